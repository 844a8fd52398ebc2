"""Iterations that an exception ended between two units, or while gradients were waited for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import api
from tests.support.parity import assert_gradients, beside_one_process
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Trouble(Exception):
    """Stands for memory that is exhausted."""


class Between(nn.Module):
    """Two units, and between them a place where backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.raises:
            hidden.register_hook(self.fail)
        return self.second(hidden)

    def fail(self, grad: torch.Tensor) -> None:
        raise Trouble


def batch(step: int) -> torch.Tensor:
    """Return the rows that every rank has."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(step))


def interrupt_between(module: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backward raise when it has left the second unit and not come to the first."""
    module.raises = True
    with pytest.raises(Trouble):
        module(batch(1)).square().sum().backward()
    module.raises = False


def interrupt_the_wait(module: Between, monkeypatch: pytest.MonkeyPatch) -> None:
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
    module, alone = beside_one_process(Between, reshard_after_forward=reshard)
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
