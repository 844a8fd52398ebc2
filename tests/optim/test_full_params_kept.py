"""``use_full_params(keep_full_params=True)``: owners have the parameters before the step, and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2.optim.whole import exchange
from tests.optim.test_full_params import on_mesh, rows
from tests.optim.test_full_params_overlap import Run, assert_same_state
from tests.support.composition import composes
from tests.support.parity import fulls, mesh_1d
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
}
LEAVES = ("nothing", "the optimizer's state")
"""What leaves the owners' parameters right."""


@on_ranks(2, 3)
@composes("kept by owners", "Muon", "uneven", "clipping")
@composes("kept by owners", "Muon", "sent in backward", "uneven", "clipping")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("between", list(BETWEEN))
def test_whatever_happens_between_steps(rank, world, between, overlap):
    """Weights and state are those of the step without it, bit for bit. A step sends parameters only where they were
    written to, in whatever way, on any rank."""
    plain, kept = Run(overlap=overlap), Run(overlap=overlap, keep=True)
    for step in range(4):
        for run in (plain, kept):
            run.sent = {"backward": 0, "step": 0}
            run.backward(step)
            BETWEEN[between](run)
            fsdp2.clip_grad_norm_(run.model.parameters(), 0.5)
            run.step()
        ours, theirs = (fulls(dict(enumerate(run.model.parameters()))) for run in (kept, plain))
        assert all(torch.equal(ours[i], theirs[i]) for i in ours), step
        if between in LEAVES and step:
            assert kept.sent["step"] < plain.sent["step"], step
        elif between != "one bit":
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
def test_a_write_on_one_rank(rank, world):
    """Owners on other ranks cannot see it, so each rank looks at its own shards, and all send what changed on any."""
    plain, kept = Run(overlap=False), Run(overlap=False, keep=True)
    for step in range(3):
        for run in (plain, kept):
            run.backward(step)
            if step == 1 and rank == 1:
                run.model.second.weight.detach().to_local().data.add_(1.0)
            run.step()
    ours, theirs = (fulls(dict(enumerate(run.model.parameters()))) for run in (kept, plain))
    assert all(torch.equal(ours[i], theirs[i]) for i in ours)


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
    ours, theirs = (fulls(dict(enumerate(run.model.parameters()))) for run in (kept, plain))
    assert all(torch.equal(ours[i], theirs[i]) for i in ours)


@on_ranks(4)
@composes("kept by owners", "Muon", "hybrid sharding")
@composes("kept by owners", "Muon", "over replicas", "hybrid sharding")
@composes("kept by owners", "Muon", "tensor parallel")
@composes("kept by owners", "Muon", "shard dim")
@composes("kept by owners", "Muon", "CPU offload")
@pytest.mark.parametrize("kind", ["hybrid", "over replicas", "tensor parallel", "columns", "offloaded"])
def test_meshes(rank, world, kind):
    """Copies on the replicate axis, pieces of pieces, other cuts, shards on the host: the same steps."""
    models = [on_mesh(kind) for _ in range(2)]
    sent: list[list[int]] = [[], []]
    real = exchange.all_to_all_uneven
    for model, keep, sizes in zip(models, (False, True), sent, strict=True):
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        fsdp2.use_full_params(optimizer, keep_full_params=keep, bucket_mb=0.0005)

        def counting(output: Tensor, data: Tensor, *arguments: Any, sizes: list[int] = sizes, **named: Any) -> Any:
            sizes.append(data.nbytes + output.nbytes)
            return real(output, data, *arguments, **named)

        for step in range(3):
            model(rows(step)).square().sum().backward()
            with mock.patch.object(exchange, "all_to_all_uneven", counting):
                optimizer.step()
            optimizer.zero_grad()
    assert sum(sent[1]) < sum(sent[0])
    plain, kept = (fulls(dict(enumerate(model.parameters()))) for model in models)
    assert all(torch.equal(plain[i], kept[i]) for i in plain)


@on_ranks(2)
def test_parameters_without_gradients_and_more_of_them(rank, world):
    """Who has no gradient in a step stays with its owner; who comes later is sent once."""
    plain, kept = Run(overlap=False), Run(overlap=False, keep=True)
    for run in (plain, kept):
        other: Any = fsdp2.fully_shard(torch.nn.Linear(6, 6, bias=False), mesh=mesh_1d())
        torch.nn.init.ones_(other.weight)
        for step in range(5):
            if step == 3:
                run.optimizer.add_param_group({"params": list(other.parameters())})
            if step == 1:
                run.model.second(run.model.first(rows(step)).tanh()).square().sum().backward()
            else:
                run.backward(step)
            other(rows(step)).square().sum().backward()
            run.step()
            other.zero_grad()
        run.other = other
    for part in ("model", "other"):
        ours, theirs = (fulls(dict(enumerate(getattr(run, part).parameters()))) for run in (kept, plain))
        assert all(torch.equal(ours[i], theirs[i]) for i in ours)
