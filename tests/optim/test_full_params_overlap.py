"""``use_full_params(overlap_backward=True)``: gradients are at their owners before the step, and results the same."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.comm import collectives
from fsdp2.optim.whole import exchange
from fsdp2.optim.whole.early import EarlyGradients
from tests.optim.test_full_params import Experts, on_mesh, rows, shard
from tests.support.composition import composes
from tests.support.parity import fulls, mesh_1d, mesh_of, shard_each
from tests.support.pool import on_ranks


class Model(nn.Module):
    """Uneven matrices, one of them smaller than the number of ranks, and a stack of five."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 14, bias=False)
        self.second = nn.Linear(14, 6, bias=False)
        self.experts = Experts()
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.second(self.first(x).tanh())))


def sharded_model() -> Model:
    """Return the model, each part of it a unit."""
    model = Model()
    for unit in (model.first, model.second, model.experts, model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    return model


class Run:
    """A model, its optimizer, and what its steps send."""

    def __init__(self, *, overlap: bool, keep: bool = False, model: Any = None, bucket_mb: float = 0.0005) -> None:
        self.model: Any = model or sharded_model()
        matrices = [param for param in self.model.parameters() if param.ndim == 2]
        self.optimizer = fsdp2.use_full_params(
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
            bucket_mb=bucket_mb,
            overlap_backward=overlap,
            keep_full_params=keep,
        )
        if stacks := [param for param in self.model.parameters() if param.ndim == 3]:
            self.optimizer.add_param_group({"params": stacks})
        self.scaler = fsdp2.ShardedGradScaler("cpu", init_scale=8.0)
        self.sent = {"backward": 0, "step": 0}
        self.other: Any = nn.Identity()

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Count the bytes that this rank sends and receives."""
        real = collectives.all_to_all_uneven

        def counting(output: Tensor, sent: Tensor, *arguments: Any, **named: Any) -> Any:
            self.sent[part] += sent.nbytes + output.nbytes
            return real(output, sent, *arguments, **named)

        with mock.patch.object(exchange, "all_to_all_uneven", counting):
            yield

    def backward(self, step: int, scale: float = 1.0) -> None:
        """Run a backward."""
        with self.counted("backward"):
            (self.model(rows(step)).square().sum() * scale).backward()

    def step(self) -> None:
        """Step, and drop the gradients."""
        with self.counted("step"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def grads(self) -> list[Any]:
        """The gradients of the shards."""
        return [param.grad for param in self.model.parameters()]


def assert_same_weights(one: nn.Module, other: nn.Module, where: object = "") -> None:
    """Assert that two models have the same weights, bit for bit."""
    ours, theirs = (fulls(dict(model.named_parameters())) for model in (one, other))
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{where} {name}"


@contextmanager
def noted_sends() -> Iterator[list[Any]]:
    """Yield a list that gets what is sent to owners before a step."""
    sends: list[Any] = []
    real = EarlyGradients._send
    with mock.patch.object(EarlyGradients, "_send", lambda *found: sends.append(found) or real(*found)):
        yield sends


def assert_same_state(one: Run, other: Run) -> None:
    """Assert that two optimizers save the same state, bit for bit."""
    ours, theirs = (run.optimizer.state_dict()["state"] for run in (one, other))
    for index, entry in theirs.items():
        for name, value in entry.items():
            got = ours[index][name]
            assert torch.equal(got.to_local(), value.to_local()) if isinstance(value, DTensor) else got == value


def _locals(run: Run) -> list[Tensor]:
    return [grad.to_local() for grad in run.grads]


def _scaler(run: Run) -> None:
    run.scaler.scale(torch.ones(()))
    run.scaler.unscale_(run.optimizer)
    run.scaler.update()


@torch.no_grad()
def _swap_columns(run: Run) -> None:
    for grad in _locals(run):
        if grad.numel():
            grad.copy_(grad.flip(-1))


@torch.no_grad()
def _last_bit(run: Run) -> None:
    grad = run.model.first.weight.grad.to_local()
    grad.view(torch.int32)[0, 0] ^= 1


BETWEEN: dict[str, Callable[[Run], object]] = {
    "nothing": lambda run: None,
    "clip_grad_norm_": lambda run: fsdp2.clip_grad_norm_(run.model.parameters(), 0.01),
    "clipped twice": lambda run: [fsdp2.clip_grad_norm_(run.model.parameters(), max_norm) for max_norm in (1.0, 0.01)],
    "ShardedGradScaler": _scaler,
    "torch's clipping": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01),
    "_foreach_mul_": lambda run: torch._foreach_mul_(_locals(run), 0.5),
    ".data": lambda run: [grad.data.mul_(0.5) for grad in run.grads],
    "signs": lambda run: torch._foreach_neg_(_locals(run)),
    "places": _swap_columns,
    "one bit": _last_bit,
    "a write, then clip_grad_norm_": lambda run: (
        torch._foreach_neg_(_locals(run)),
        fsdp2.clip_grad_norm_(run.model.parameters(), 0.01),
    ),
    "another backward": lambda run: run.backward(17),
    "dropped, another backward": lambda run: (run.optimizer.zero_grad(), run.backward(17)),
    "set to None by hand": lambda run: [
        *(setattr(param, "grad", None) for param in run.model.parameters()),
        run.backward(17),
    ],
    "replaced": lambda run: [
        setattr(param, "grad", torch.ones_like(param.detach())) for param in run.model.parameters()
    ],
}
KEPT = ("nothing", "clip_grad_norm_", "clipped twice", "ShardedGradScaler")
"""What leaves the copies at the owners right."""


@on_ranks(2, 3)
@composes("sent in backward", "Muon", "clipping", "uneven", "accumulation")
@pytest.mark.parametrize("between", list(BETWEEN))
def test_whatever_happens_between_backward_and_step(rank, world, between):
    """Weights and state are those of the step without it, bit for bit. The step sends gradients only where they were
    changed in a way that nobody tells: no version counter of a DTensor shows torch's clipping, or a write to locals."""
    plain, early = Run(overlap=False), Run(overlap=True)
    for step in range(3):  # the first learns what to send, the third follows one that was disturbed
        for run in (plain, early):
            run.sent = {"backward": 0, "step": 0}
            run.backward(step)
            BETWEEN[between](run)
            run.step()
        assert_same_weights(early.model, plain.model, step)
        assert plain.sent["backward"] == 0 and (early.sent["backward"] > 0) == (step > 0)
        if between in KEPT and step:
            assert early.sent["step"] < plain.sent["step"], step
        elif between != "one bit" and rank == 0:
            assert early.sent["step"] == plain.sent["step"]
    assert_same_state(early, plain)


@on_ranks(4)
@composes("sent in backward", "Muon", "clipping", "hybrid sharding")
@composes("sent in backward", "Muon", "clipping", "over replicas", "hybrid sharding")
@composes("sent in backward", "Muon", "clipping", "shard dim")
@composes("sent in backward", "Muon", "clipping", "CPU offload")
@composes("kept by owners", "Muon", "clipping", "hybrid sharding")
@composes("kept by owners", "Muon", "clipping", "over replicas", "hybrid sharding")
@composes("kept by owners", "Muon", "clipping", "tensor parallel")
@composes("kept by owners", "Muon", "clipping", "shard dim")
@composes("kept by owners", "Muon", "clipping", "CPU offload")
@pytest.mark.parametrize("kind", ["hybrid", "over replicas", "tensor parallel", "columns", "offloaded"])
def test_meshes(rank, world, kind):
    """Copies on the replicate axis, pieces of pieces, other cuts, shards on the host: the same steps with each option.

    Tensor-parallel ranks have pieces of other sizes, whose gradients may be reduced in another order: nothing is sent
    before the step there.
    """
    plain, *others = [
        Run(model=on_mesh(kind), overlap=overlap, keep=keep)
        for overlap, keep in ((False, False), (True, False), (False, True))
    ]
    with noted_sends() as sends:
        for run in (plain, *others):
            for step in range(3):
                run.backward(step)
                fsdp2.clip_grad_norm_(run.model.parameters(), 0.1)
                run.step()
    assert bool(sends) == (kind != "tensor parallel")
    early, kept = others
    assert kept.sent["step"] < plain.sent["step"] and (early.sent["backward"] > 0) == bool(sends)
    for run in others:
        assert_same_weights(run.model, plain.model)


@on_ranks(4)
@composes("sent in backward", "Adam", "over replicas", "uneven")
@pytest.mark.parametrize("keep", [False, True])
def test_columns_without_elements(rank, world, keep):
    """Over replicas they had the gradients of a unit earlier than the others, and owners stepped on a mixture."""
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    models = []
    for overlap in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 6))
        shard_each(model, fsdp2, mesh=mesh, shard_over_replicas=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        fsdp2.use_full_params(optimizer, overlap_backward=overlap, keep_full_params=keep)
        for step in range(3):
            model(rows(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same_weights(models[1], models[0])


class Branches(nn.Module):
    """Layers of several shapes that stand side by side, and are run in an order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, 6 * (i + 1), bias=False) for i in range(4))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[i](x).tanh().sum() for i in self.order]).sum()


@on_ranks(2, 4)
def test_ranks_whose_gradients_are_finished_in_another_order(rank, world):
    """Autograd finishes the gradients of a unit in the order in which its rank ran the layers. They are reduced, and
    so sent to their owners, in one order on all ranks."""
    order = [(i + rank) % 4 for i in range(4)]
    models = [fsdp2.fully_shard(Branches(order), mesh=mesh_1d()) for _ in range(2)]
    with noted_sends() as sends:
        for model, overlap in zip(models, (False, True), strict=True):
            optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
            fsdp2.use_full_params(optimizer, overlap_backward=overlap, bucket_mb=0.0005)
            for step in range(4):
                model(rows(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(sends) > 4  # several in a backward
    assert_same_weights(models[1], models[0])


@on_ranks(2)
def test_what_is_left_is_sent_with_the_last_gradient(rank, world):
    """Gradients that do not fill a part of a bucket were left to the step, also those of the first layers of a large
    model on many ranks. They are sent when the last of those has come that the step before had."""
    run = Run(overlap=True, bucket_mb=64.0)
    for step in range(3):
        run.sent = {"backward": 0, "step": 0}
        run.backward(step)
        assert (run.sent["backward"] > 0) == (step > 0)
        run.step()
        if step == 0:
            first = run.sent["step"]
        elif rank == 0:
            assert run.sent["step"] < first


@on_ranks(2)
def test_each_gradient_is_sent_once(rank, world):
    """In several parts, of which none has a gradient of an earlier one."""
    runs = [Run(overlap=overlap) for overlap in (False, True)]
    for step in range(3):
        for run in runs:
            run.sent = {"backward": 0, "step": 0}
            run.backward(step)
            run.step()
    plain, early = (sum(run.sent.values()) for run in runs)
    assert early == plain


@on_ranks(2)
def test_copies_of_models_and_more_groups(rank, world):
    """A deep copy of the model sends nothing, though it has the hooks; a new group of parameters is sent as well."""
    run = Run(overlap=True)
    run.backward(0)
    run.step()
    copied = copy.deepcopy(run.model)
    with run.counted("backward"):
        copied(rows(1)).sum().backward()
    assert run.sent["backward"] == 0
    other = shard(nn.Sequential(nn.Linear(6, 6, bias=False)), mesh_1d())
    run.optimizer.add_param_group({"params": list(other.parameters())})
    for step in range(2):
        with run.counted("backward"):
            other(rows(step)).square().sum().backward()
        assert (run.sent["backward"] > 0) == (step > 0)
        run.step()


@on_ranks(2)
def test_an_optimizer_that_is_dropped(rank, world):
    """The garbage collector frees it at another time on each rank. Until then its hooks sent gradients, on one rank and
    not on the other. They send in one more backward, on all ranks, and keep nothing."""
    run = Run(overlap=True)
    for step in range(2):
        run.backward(step)
        run.step()
    model, other = run.model, torch.optim.SGD(run.model.parameters(), lr=0.1)
    gc.disable() if rank else None
    try:
        del run
        gc.collect() if rank == 0 else None
        with noted_sends() as sends:
            for step in range(3):
                model(rows(step)).square().sum().backward()
                other.step()
                other.zero_grad()
    finally:
        gc.enable()
    counts = [None] * world
    dist.all_gather_object(counts, len(sends))
    assert counts == [len(sends)] * world
    sends.clear()
    known = weakref.ref(model.first.weight)
    del model, other
    gc.collect()
    assert known() is None


def frozen_at_first(run: Run, step: int) -> None:
    """A frozen parameter takes no hook, and its gradients are sent by the step after it was unfrozen."""
    run.model.first.weight.requires_grad_(step > 1)
    run.backward(step)


def left_out(run: Run, step: int) -> None:
    """A backward that does not use a matrix leaves it alone, and its owner keeps what it has."""
    if step == 2:
        run.model.second(run.model.first(rows(step)).tanh()).square().sum().backward()
    else:
        run.backward(step)


def added_later(run: Run, step: int) -> None:
    """A matrix that comes later is sent once."""
    if step == 0:
        run.other = shard(nn.Sequential(nn.Linear(6, 6, bias=False)), mesh_1d())
        nn.init.ones_(run.other[0].weight)
    if step == 2:
        run.optimizer.add_param_group({"params": list(run.other.parameters())})
    run.other.zero_grad()
    run.other(rows(step)).square().sum().backward()
    run.backward(step)


@on_ranks(2)
@pytest.mark.parametrize("backward", [frozen_at_first, left_out, added_later])
def test_matrices_without_a_gradient(rank, world, backward):
    """In some steps; with each option and without, the weights are the same."""
    runs = [Run(overlap=overlap, keep=keep) for overlap, keep in ((False, False), (True, False), (False, True))]
    for step in range(4):
        for run in runs:
            backward(run, step)
            run.step()
    models = [nn.ModuleList([run.model, run.other]) for run in runs]
    for model in models[1:]:
        assert_same_weights(model, models[0])


@on_ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_gradient_that_another_hook_drops(rank, world, everywhere):
    """A hook that was there first leaves no gradient behind: backward raised a raw error. On one rank alone the step is
    refused, and what that rank sends has the size that others expect."""
    plain, early = Run(overlap=False), Run(overlap=True)
    dropping = [False]

    def drop(param: Tensor) -> None:
        if dropping[0]:
            param.grad = None

    for run in (plain, early):
        run.model.second.weight.register_post_accumulate_grad_hook(drop)
    for step in range(4):
        dropping[0] = step == 2 and (everywhere or rank == 0)
        for run in (plain, early):
            run.backward(step)
            if step == 2 and not everywhere:
                with pytest.raises(RuntimeError, match="ranks have different gradients of parameter 1 of group 0"):
                    run.optimizer.step()
                run.optimizer.zero_grad()
            else:
                run.step()
    assert_same_weights(early.model, plain.model)
