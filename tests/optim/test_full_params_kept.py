"""``use_full_params(keep_full_params=True)``: owners have the parameters before the step, and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2.optim.whole import exchange
from tests.optim.test_full_params_overlap import Run, assert_same_state, assert_same_weights
from tests.support.composition import composes
from tests.support.pool import on_ranks


def _shards(run: Run) -> list[Tensor]:
    return [param.detach().to_local() for param in run.model.parameters()]


@torch.no_grad()
def _last_bit(run: Run) -> None:
    if run.model.first.weight.to_local().numel():
        run.model.first.weight.to_local().view(torch.int32)[0, 0] ^= 1


@torch.no_grad()
def _load(run: Run) -> None:
    run.model.load_state_dict({name: value * 0.5 for name, value in run.model.state_dict().items()})


@torch.no_grad()
def _average(run: Run) -> None:
    for param in run.model.parameters():
        param.lerp_(torch.ones_like(param), 0.1)


def _on_one_rank(run: Run) -> None:
    """Owners on other ranks cannot see it, so each rank looks at its own shards."""
    if dist.get_rank() == 1:
        run.model.second.weight.detach().to_local().data.add_(1.0)


def _load_state(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


BETWEEN: dict[str, Callable[[Run], object]] = {
    "nothing": lambda run: None,
    "the optimizer's state": _load_state,
    "a checkpoint": _load,
    "a moving average": _average,
    ".data": lambda run: [shard.data.mul_(0.5) for shard in _shards(run)],
    "_foreach_mul_": lambda run: torch._foreach_mul_(_shards(run), 0.5),
    "signs": lambda run: torch._foreach_neg_(_shards(run)),
    "one bit": _last_bit,
    "on one rank": _on_one_rank,
}
LEAVES = ("nothing", "the optimizer's state")
"""What leaves the owners' parameters right."""
OF_ONE = ("one bit", "on one rank")
"""What changes one parameter."""


@on_ranks(2, 3)
@composes("kept by owners", "Muon", "uneven", "clipping")
@composes("kept by owners", "Muon", "sent in backward", "uneven", "clipping")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("between", list(BETWEEN))
def test_whatever_happens_between_steps(rank, world, between, overlap):
    """Weights and state are those of the step without it, bit for bit. A step sends parameters only where they were
    written to, in whatever way, on any rank."""
    plain, kept = Run(overlap=overlap), Run(overlap=overlap, keep=True)
    for step in range(3):
        for run in (plain, kept):
            run.sent = {"backward": 0, "step": 0}
            run.backward(step)
            BETWEEN[between](run)
            fsdp2.clip_grad_norm_(run.model.parameters(), 0.5)
            run.step()
        assert_same_weights(kept.model, plain.model, step)
        if between in LEAVES and step:
            assert kept.sent["step"] < plain.sent["step"], step
        elif between not in OF_ONE:
            assert kept.sent["step"] == plain.sent["step"]
    assert_same_state(kept, plain)


@on_ranks(2)
def test_what_is_there_is_not_sent(rank, world):
    """With both options a step sends new values only, a third of the bytes, in half as many collectives."""
    runs = [Run(overlap=both, keep=both, bucket_mb=64.0) for both in (False, True)]
    launches: list[list[int]] = [[], []]
    real = exchange.all_to_all_uneven

    def counting(output: Tensor, sent: Tensor, *arguments: Any, **named: Any) -> Any:
        launches[-1].append(sent.nbytes)
        return real(output, sent, *arguments, **named)

    for run in runs:
        for step in range(2):
            run.backward(step)
            launches.append([])
            with mock.patch.object(exchange, "all_to_all_uneven", counting):
                run.optimizer.step()
            run.optimizer.zero_grad()
    *_, first_plain, plain, first_kept, kept = launches
    assert first_plain == plain == first_kept
    assert len(plain) == 2 and kept == plain[1:], (plain, kept)


@on_ranks(2)
def test_a_step_that_fails(rank, world):
    """The owner that failed keeps nothing; after a checkpoint was loaded, steps are right again."""
    plain, kept = Run(overlap=False), Run(overlap=False, keep=True)
    for run in (plain, kept):
        run.backward(0)
        run.step()
    weights = [{name: value.clone() for name, value in run.model.state_dict().items()} for run in (plain, kept)]
    states = [run.optimizer.state_dict() for run in (plain, kept)]
    kept.backward(1)
    lr = kept.optimizer.param_groups[0]["lr"]
    if rank == 0:
        kept.optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        kept.optimizer.step()
    kept.optimizer.param_groups[0]["lr"] = lr
    kept.optimizer.zero_grad()
    for run, saved, state in zip((plain, kept), weights, states):
        run.model.load_state_dict(saved)
        run.optimizer.load_state_dict(state)
        for step in (1, 2):
            run.backward(step)
            run.step()
    assert_same_weights(kept.model, plain.model)
