"""Iterations that an exception ended between two units, or while gradients were waited for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.support import api
from tests.support.models import linears, mlp
from tests.support.parity import assert_gradients, beside_one_process
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Trouble(Exception):
    """Stands for memory that is exhausted."""


def fail(*unused: object) -> None:
    """Be a hook that raises."""
    raise Trouble


def batch(step: int) -> torch.Tensor:
    """Return the rows that every rank has."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(step))


def interrupt_between(module: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backward raise when it has left the second unit and not come to the first."""
    _, between, _ = module
    handle = between.register_full_backward_hook(fail)
    with pytest.raises(Trouble):
        module(batch(1)).square().sum().backward()
    handle.remove()


def interrupt_the_wait(module: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while backward waits for the last gradients."""

    def finish() -> None:
        raise KeyboardInterrupt

    loss = module(batch(1)).square().sum()
    with monkeypatch.context() as patched:
        patched.setattr(module._get_fsdp_state().root.comm.reductions, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("interrupt", [interrupt_between, interrupt_the_wait])
def test_a_step_after_a_backward_that_did_not_end(rank, world, interrupt, trained, reshard):
    """Inside a unit an exception is noticed by the unit itself. Between two, ``zero_grad()`` and the next step without
    ``reset_iter_state()`` added the gradients of the failed iteration to those of the next, without a word."""
    module, alone = beside_one_process(partial(mlp, 6, 6, 6), linears, reshard_after_forward=reshard)
    if trained:
        module(batch(0)).square().sum().backward()
    module.zero_grad()
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt(module, monkeypatch)
    module.zero_grad()
    for _ in range(2):  # and it does not forget it
        with pytest.raises(RuntimeError, match=r"its last backward did not end .*call reset_iter_state\(\)"):
            module(batch(2))
    module.reset_iter_state()
    for _ in range(2):
        for one in (module, alone):
            one.zero_grad()
            one(batch(2)).square().sum().backward()
        assert_gradients(module, alone)
