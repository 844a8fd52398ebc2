"""``use_full_params``: a step of whole matrices at their owners is the step of one process, bit for bit."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import fsdp2
from fsdp2.optim.whole import exchange, full_params
from fsdp2.optim.whole.ownership import RankSet
from fsdp2.tools.check.strict import LiveBytes
from tests.support.composition import composes
from tests.support.parity import assert_weights, full, fulls, mesh_1d, mesh_2d, mesh_of, placed_like, shard_each
from tests.support.pool import POOL, on_ranks

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """Lists of matrices as state, a count in the group, and state made at the first step, as others have it."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Precondition every gradient with the sums of its products."""
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.eye(size) for size in p.shape]
                    state["count"] = 0
                    state["moment"] = torch.zeros_like(p)
                state["count"] += 1
                left, right = state["factors"]
                left.add_(p.grad @ p.grad.T)
                right.add_(p.grad.T @ p.grad)
                state["moment"].lerp_(torch.linalg.solve(left, p.grad) @ right / group["steps"], 0.3)
                p.sub_(state["moment"], alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "Shampoo": lambda params: Shampoo(params, lr=0.02),
}
THIRD_PARTY: dict[str, Make] = {  # of pytorch_optimizer; what they see of a group as a whole is switched off
    "pytorch_optimizer.Muon": lambda params: _other("Muon")([{"params": list(params), "use_muon": True}], lr=0.02),
    "pytorch_optimizer.NorMuon": lambda params: _other("NorMuon")(
        [{"params": list(params), "use_muon": True}], lr=0.02
    ),
    "pytorch_optimizer.SOAP": lambda params: _other("SOAP")(list(params), lr=0.02, precondition_frequency=2),
    "pytorch_optimizer.Shampoo": lambda params: _other("Shampoo")(list(params), lr=0.02, momentum=0.9),
    "pytorch_optimizer.ScalableShampoo": lambda params: _other("ScalableShampoo")(
        list(params), lr=0.02, start_preconditioning_step=2, preconditioning_compute_steps=1
    ),
    "pytorch_optimizer.Lamb": lambda params: _other("Lamb")(list(params), lr=0.02, max_grad_norm=0.0),
}
OPTIMIZERS |= THIRD_PARTY


def _other(name: str) -> Any:
    return getattr(importlib.import_module("pytorch_optimizer"), name)


def stack() -> nn.Sequential:
    """Return matrices of uneven sizes, one of fewer rows than ranks, equal for each call."""
    torch.manual_seed(7)
    sizes = [6, 14, 3, 10, 6]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)))


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Make every layer a unit."""
    shard_each(module, fsdp2, mesh=mesh, **options)
    return module


def pair(name: str, module: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Return a sharded stack and its optimizer of this name, then one process's."""
    module, reference = module or shard(stack(), mesh_1d()), stack()
    optimizer = OPTIMIZERS[name](module.parameters())
    assert fsdp2.use_full_params(optimizer, **options) is optimizer
    return module, optimizer, reference, OPTIMIZERS[name](reference.parameters())


def rows(step: int) -> Tensor:
    """Return the same input on every rank."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def set_gradients(module: nn.Module, reference: nn.Module, step: int) -> None:
    """Run a backward of ``module`` and give the reference the same gradients, whole."""
    module(rows(step)).square().sum().backward()
    gradients = fulls({index: parameter.grad for index, parameter in enumerate(module.parameters())})
    for gradient, plain in zip(gradients.values(), reference.parameters(), strict=True):
        plain.grad = gradient


def train(module: Any, optimizer: Any, reference: Any, plain: Any, steps: Iterable[int] = range(4)) -> None:
    """Take steps on both with equal gradients; the weights agree bit for bit after each."""
    for step in steps:
        set_gradients(module, reference, step)
        step_both(optimizer, plain)
        assert_equal(module.parameters(), reference.parameters())


def step_both(*optimizers: torch.optim.Optimizer) -> None:
    """Step and drop the gradients."""
    for one in optimizers:
        one.step()
        one.zero_grad()


def assert_equal(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Assert that whole tensors are equal bit for bit."""
    ours, theirs = (fulls(dict(enumerate(one))).values() for one in (ours, theirs))
    assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


def whole(value: Any) -> Any:
    """Return a DTensor's full tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that two state dicts hold the same whole values."""
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entry in ours["state"].items():
        assert entry.keys() == theirs["state"][key].keys()
        for name, value in entry.items():
            other = theirs["state"][key][name]
            for a, b in zip(*(v if isinstance(v, list) else [v] for v in (value, other)), strict=True):
                assert torch.equal(whole(a), whole(b)) if isinstance(a, Tensor) else a == b, name


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Shampoo"])
def test_steps_are_those_of_one_process(rank, world, name):
    """Uneven matrices, in one bucket and in several; state dicts are those of one process too, and load there."""
    for bucket_mb in (64.0, 0.0005):
        module, optimizer, reference, plain = pair(name, bucket_mb=bucket_mb)
        train(module, optimizer, reference, plain)
        saved = optimizer.state_dict()
        assert_same_state(saved, plain.state_dict())
        for source in (saved, plain.state_dict()):
            again = fsdp2.use_full_params(OPTIMIZERS[name](module.parameters()))
            again.load_state_dict(copy.deepcopy(source))
            assert_same_state(again.state_dict(), saved)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut layers over the second dimension of a mesh, by rows and by columns in turn."""
    ways = [ColwiseParallel(), RowwiseParallel()] * 2
    return parallelize_module(module, mesh, {str(i): way for i, way in enumerate(ways)})


def on_mesh(kind: str) -> nn.Module:
    """Return the stack, sharded over all four ranks in one of these ways."""
    if kind == "tensor parallel":
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        return shard(tensor_parallel(stack(), mesh["tp"]), mesh["dp"])
    if kind in ("hybrid", "over replicas"):
        return shard(stack(), mesh_2d(), shard_over_replicas=kind == "over replicas")
    if kind == "columns":
        return shard(stack(), mesh_1d(), shard_placement_fn=lambda p: Shard(1))
    if kind == "offloaded":
        return shard(stack(), mesh_1d(), offload_policy=fsdp2.CPUOffloadPolicy())
    return shard(stack(), mesh_1d())


class Experts(nn.Module):
    """A stack of matrices beside a matrix; five experts, so that ranks hold unlike numbers of them."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(6, count, bias=False)
        self.stack = nn.Parameter(torch.randn(count, 6, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,bi,eio->bo", self.router(x).softmax(-1), x, self.stack)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["Muon", "Shampoo", "plain"])
def test_a_matrix_each_of_a_stack(rank, world, name):
    """Experts in one parameter are matrices of their own to Muon, and to others where ``stacked`` says so, with the
    learning rate of their own shape. torch's Muon refuses three dimensions, and one matrix would mix the experts."""
    module, reference = Experts(), Experts()
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in reference.stack]
    ignored = {module.stack} if name == "plain" else set()
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params=ignored)

    def make(model: Any = module) -> torch.optim.Optimizer:
        if name == "Shampoo":
            return fsdp2.use_full_params(Shampoo(model.parameters(), 0.02), stacked=lambda param: param.ndim == 3)
        made = fsdp2.use_full_params(torch.optim.Muon([model.router.weight], lr=0.02, weight_decay=0.1))
        made.add_param_group({"params": [model.stack]})
        return made

    optimizer = make()
    kind = Shampoo if name == "Shampoo" else torch.optim.Muon
    options = {"lr": 0.02} if name == "Shampoo" else {"lr": 0.02, "weight_decay": 0.1}
    plain = kind([reference.router.weight, *apart], **options)
    for step in range(4):
        module(rows(step)).square().sum().backward()
        reference.router.weight.grad, grads = (full(p.grad) for p in (module.router.weight, module.stack))
        for matrix, grad in zip(apart, grads, strict=True):
            matrix.grad = grad.clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        assert torch.equal(full(module.router.weight), reference.router.weight)
        assert torch.equal(full(module.stack), torch.stack(apart))
        if step == 1:  # another optimizer goes on, with state that is sharded like the stack
            saved = optimizer.state_dict()
            for entry in saved["state"].values():
                assert all(type(value) is not Tensor or not value.ndim for value in entry.values()) or name == "plain"
            optimizer = make()
            optimizer.load_state_dict(copy.deepcopy(saved))
    state = optimizer.state_dict()["state"][0 if name == "Shampoo" else 1]  # a module's own parameters come first
    moment = state["moment" if name == "Shampoo" else "momentum_buffer"]
    assert moment.shape == module.stack.shape and isinstance(moment, DTensor) == (name != "plain")


class Orthogonal(torch.optim.Optimizer):
    """A Muon that takes batches of matrices; it notes the shapes that it was given."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Orthogonalize the moments by a few steps of Newton and Schulz."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.seen.append(tuple(p.shape))
                state = self.state[p]
                if not state:
                    state["moment"], state["step"] = torch.zeros_like(p), torch.zeros(())
                state["step"] += 1
                x = state["moment"].lerp_(p.grad, 0.5)
                x = x / x.norm(dim=(-2, -1), keepdim=True)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x, alpha=group["lr"])


@on_ranks(1, 2, 3)
def test_matrices_of_one_shape_in_one_batch(rank, world):
    """The optimizer is called with one tensor for all matrices of a shape that a rank owns, those of stacks too, and
    weights and state dicts are those of one matrix at a time."""
    optimizers: list[Any] = []
    models: list[Any] = []
    for batched in (False, True):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), *(Experts(4) for _ in range(3)))
        for expert in model[1:]:
            expert.forward = lambda x, expert=expert: Experts.forward(expert, x) @ torch.ones(4, 6)
        shard(model, mesh_1d())
        optimizer = Orthogonal(model.parameters())
        fsdp2.use_full_params(optimizer, stacked=lambda param: param.ndim == 3, batched=batched)
        optimizers.append(optimizer)
        models.append(model)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.seen.clear()
            model(rows(step)).square().sum().backward()
            step_both(optimizer)
        assert_weights(*models)
        alone, together = (optimizer.seen for optimizer in optimizers)
        assert {shape[1:] for shape in together} == set(alone) and len(together) == len(set(alone))
        assert sum(shape[0] for shape in together) == len(alone)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    for key, entry in saved[0]["state"].items():
        other = saved[1]["state"][key]
        assert entry.keys() == other.keys()
        for name, value in entry.items():
            torch.testing.assert_close(full(value), full(other[name]))
    optimizers[0].load_state_dict(copy.deepcopy(saved[1]))
    optimizers[1].load_state_dict(copy.deepcopy(saved[0]))
    for model, optimizer in zip(models, optimizers, strict=True):
        model(rows(3)).square().sum().backward()
        optimizer.step()
    assert_weights(*models)


class Counting(torch.optim.Optimizer):
    """Divides each step by the number of steps that a parameter has taken, in numbers of Python and of torch."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["step"] = state.get("step", torch.zeros(())) + 1
                p.sub_(p.grad / (state["step"].item() + state["count"]))


@on_ranks(1, 2)
@pytest.mark.parametrize("batched", [False, True])
def test_matrices_that_have_taken_other_numbers_of_steps(rank, world, batched):
    """A matrix without a gradient is left alone. In a batch with others afterwards, whose counts were one tensor or
    "different int values", an optimizer that computes with its count, as Adam does, raised an error on its owner."""
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    models = [shard(copy.deepcopy(alone), mesh_1d()), alone]
    optimizers = [Counting(model.parameters()) for model in models]
    fsdp2.use_full_params(optimizers[0], batched=batched)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            for index, param in enumerate(model.parameters()):
                whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + index))
                param.grad = None if step and index == step else placed_like(whole, param)
            optimizer.step()
    assert_weights(*models)


class Slowing(torch.optim.Optimizer):
    """Counts steps in the options of its groups, as schedule-free optimizers do, and divides by the count."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / group["k"])


@on_ranks(1, 2)
@pytest.mark.parametrize("batched", [False, True])
def test_a_group_counts_steps_in_which_nothing_of_it_has_a_gradient(rank, world, batched):
    """A layer that is frozen for the first steps: its group was left out of these, so its count fell behind that of one
    process, and the layer was trained with larger steps from then on."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    models = [shard(copy.deepcopy(alone), mesh_1d()), alone]
    optimizers = [Slowing([{"params": [*layer.parameters()]} for layer in model]) for model in models]
    fsdp2.use_full_params(optimizers[0], batched=batched, bucket_mb=1e-5)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model[0].requires_grad_(step > 1)
            model(rows(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [[group["k"] for group in optimizer.param_groups] for optimizer in optimizers] == [[4, 4], [4, 4]]
    assert_weights(*models)


class Numbered(torch.optim.Optimizer):
    """Steps by the sign of gradients, and gives each parameter a number of its own that is no tensor."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("number", sum("number" in state for state in self.state.values()))
                p.sub_(p.grad.sign(), alpha=0.1)


@on_ranks(1, 2)
def test_numbers_that_differ_between_matrices_of_a_stack(rank, world):
    """Steps are right, since each matrix has its state where it is owned; a state dict has one number for a stack."""
    torch.manual_seed(7)
    model = Experts(4)
    alone = copy.deepcopy(model)
    shard(model, mesh_1d())
    optimizer = fsdp2.use_full_params(Numbered(model.parameters()), stacked=lambda param: param.ndim == 3)
    for one in (model, alone):
        one(rows(0)).square().sum().backward()
    optimizer.step()
    Numbered(alone.parameters()).step()
    assert_weights(model, alone)
    with pytest.raises(RuntimeError, match=r"a stack of \d matrices has different int values in its state"):
        optimizer.state_dict()["state"][0]["number"]


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"keep_full_params": True}, {"overlap_backward": True}])
@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4)])
def test_stacks_without_elements(rank, world, shape, options):
    """A layer may have no experts. Each matrix costs an equal part of the stack: a ZeroDivisionError."""
    module = nn.ParameterDict({"experts": torch.ones(shape), "weight": torch.ones(4, 4)})
    plain = [param.detach().clone() for param in module.values()]
    fsdp2.fully_shard(module, mesh=mesh_1d())
    optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
    optimizer = fsdp2.use_full_params(optimizer, stacked=lambda param: param.ndim == 3, **options)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([param.sum().full_tensor() for param in module.values()]).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for param, before in zip(module.values(), plain, strict=True):
        torch.testing.assert_close(full(param), before - 0.5 * (1 + 1.9))
    assert len(optimizer.state_dict()["state"]) == 2


@on_ranks(2)
def test_what_is_no_stack(rank, world):
    """Where ``stacked`` is wrong, every rank raises before anything is changed; convolutions stay torch's business."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3))
    fsdp2.fully_shard(module, mesh=mesh_1d())
    before = [full(param) for param in module.parameters()]
    module(torch.ones(4, 4)).sum().backward()
    optimizer = fsdp2.use_full_params(torch.optim.Adafactor(module.parameters()), stacked=lambda param: True)
    with pytest.raises(ValueError, match=r"stacked\(\) is true for a parameter of shape \(4, 4\); expected three"):
        optimizer.step()
    assert all(torch.equal(full(param), old) for param, old in zip(module.parameters(), before, strict=True))
    muon = fsdp2.use_full_params(torch.optim.Muon([module[0].weight]))
    muon.add_param_group({"params": [module[1].weight]})
    with pytest.raises((ValueError, RuntimeError), match=r"2D matrix|Muon raised on rank"):
        muon.step()


@on_ranks(4)
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("kind", ["hybrid", "over replicas", "tensor parallel", "columns", "offloaded"])
def test_meshes(rank, world, name, kind):
    """Copies on the replicate axis, pieces of pieces, and other cuts: the same steps."""
    module, optimizer, reference, plain = pair(name, on_mesh(kind))
    train(module, optimizer, reference, plain, range(2))
    assert_same_state(optimizer.state_dict(), plain.state_dict())


def exchanging(sizes: list[int]) -> Any:
    """Return a context that adds the number of ranks of each exchange to ``sizes``."""
    real = exchange.all_to_all_uneven

    def noting(*arguments: Any, **named: Any) -> Any:
        sizes.append(arguments[4].size)
        return real(*arguments, **named)

    return mock.patch.object(exchange, "all_to_all_uneven", noting)


@on_ranks(4)
@composes("Muon", "hybrid sharding")
@composes("Muon", "hybrid sharding", "sent in backward", "kept by owners")
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
@pytest.mark.parametrize("options", [{}, {"overlap_backward": True, "keep_full_params": True}])
def test_an_owner_in_each_replica(rank, world, name, options):
    """Nothing travels between replicas, and results and states are the same; errors reach all replicas."""
    sizes: list[int] = []
    module, optimizer, reference, plain = pair(name, on_mesh("hybrid"), over_replicas=False, **options)
    with exchanging(sizes):
        train(module, optimizer, reference, plain, range(3))
    assert set(sizes) == {2}
    saved = optimizer.state_dict()
    assert_same_state(saved, plain.state_dict())
    again = fsdp2.use_full_params(OPTIMIZERS[name](module.parameters()), over_replicas=False)
    again.load_state_dict(copy.deepcopy(saved))
    assert_same_state(again.state_dict(), saved)
    set_gradients(module, reference, 3)
    if rank == 3:
        module[1].weight.grad = None
    with pytest.raises(RuntimeError, match="Nothing was changed"):
        optimizer.step()


class LocalExperts(nn.Module):
    """A rank's experts, of which it has the parts that its data-parallel group leaves it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.stack = nn.Parameter(distribute_tensor(torch.randn(4, 6, 4) / 3, mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->bo", x, self.stack.to_local())


@on_ranks(4)
@composes("Muon", "experts")
@composes("Muon", "experts", "sent in backward", "kept by owners")
@pytest.mark.parametrize("options", [{}, {"overlap_backward": True, "keep_full_params": True}])
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_experts_on_a_mesh_of_their_own(rank, world, name, options):
    """Expert parallelism: the pieces of an expert are sent among the ranks that hold it, two of four, in backward too.
    Its states are stacked, also those that are not cut like it."""
    mesh = mesh_of(2, 2, names=("shard", "experts"))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), LocalExperts(mesh["experts"]))
    dense, stack = (full(param) for param in model.parameters())
    fsdp2.fully_shard(model[0], mesh=mesh_of(4, names=("all",)))
    fsdp2.fully_shard(model[1], mesh=mesh["shard"], shard_placement_fn=lambda param: Shard(1))

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](params)

    def wrapped() -> torch.optim.Optimizer:
        made = fsdp2.use_full_params(make([model[0].weight]), stacked=lambda param: param.ndim == 3, **options)
        made.add_param_group({"params": [model[1].stack]})
        return made

    apart = [nn.Parameter(one) for one in (dense, *stack)]
    optimizer, plain = wrapped(), make(apart)
    sizes: dict[str, list[int]] = {"backward": [], "step": []}
    for step in range(4):
        with exchanging(sizes["backward"]):
            model(rows(step)).square().sum().backward()
        grads = [model[0].weight.grad.full_tensor(), *model[1].stack.grad.full_tensor()]
        for param, grad in zip(apart, grads, strict=True):
            param.grad = grad.clone()
        with exchanging(sizes["step"]):
            optimizer.step()
        plain.step()
        optimizer.zero_grad()
        assert torch.equal(full(model[0].weight), apart[0])
        assert torch.equal(full(model[1].stack), torch.stack(apart[1:]))
        if step == 1:
            saved = optimizer.state_dict()
            optimizer = wrapped()
            optimizer.load_state_dict(copy.deepcopy(saved))
    assert set(sizes["step"]) == {2, 4} and set(sizes["backward"]) == ({2, 4} if options else set())
    state = optimizer.state_dict()["state"]
    for index, params in enumerate((apart[:1], apart[1:])):
        for key, value in state[index].items():
            values = value if isinstance(value, list) else [value]
            for k, one in enumerate(values):
                theirs = [plain.state[p][key] for p in params]
                theirs = [each[k] if isinstance(each, list) else each for each in theirs]
                if isinstance(one, Tensor) and one.ndim:
                    assert torch.equal(whole(one), torch.stack(theirs) if index else theirs[0]), key


@on_ranks(4)
def test_meshes_that_cross(rank, world):
    """Layers on the rows of a mesh of ranks, and others on its columns: all ranks take the same ones for owners."""
    mesh = mesh_of(2, 2, names=("a", "b"))
    module = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2)), nn.Linear(6, 3, bias=False))
    for layer, name in zip(module, ("a", "b", "a")):
        fsdp2.fully_shard(layer, mesh=mesh[name])
    optimizer = fsdp2.use_full_params(torch.optim.Muon(module.parameters(), lr=0.02))
    apart = [nn.Parameter(full(param)) for param in module.parameters()]
    plain = torch.optim.Muon(apart, lr=0.02)
    for step in range(2):
        module(rows(step)).square().sum().backward()
        for mine, theirs in zip(module.parameters(), apart, strict=True):
            theirs.grad = mine.grad.full_tensor()
        step_both(optimizer, plain)
        assert_equal(module.parameters(), apart)


def save(rank: int, world: int, path: str, name: str) -> None:
    """Train two steps and save model and optimizer."""
    module, optimizer, reference, plain = pair(name)
    train(module, optimizer, reference, plain, range(2))
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.save(state, checkpoint_id=path)


def resume(rank: int, world: int, path: str, name: str, with_torch: bool) -> None:
    """Go on from there, ours or torch's optimizer on DTensors, as one process that never stopped."""
    module, reference = shard(stack(), mesh_1d()), stack()
    plain = OPTIMIZERS[name](reference.parameters())
    for step in range(2):
        fresh = shard(copy.deepcopy(reference), mesh_1d())
        set_gradients(fresh, reference, step)
        plain.step()
    optimizer = OPTIMIZERS[name](module.parameters())
    optimizer = optimizer if with_torch else fsdp2.use_full_params(optimizer)
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        # Gradients were summed over other ranks.
        torch.testing.assert_close(whole(one.detach()), other.detach(), rtol=1e-4, atol=1e-5)
    loaded = optimizer.state_dict()["state"]
    if not with_torch:
        with torch.no_grad():
            for i, (one, other) in enumerate(zip(module.parameters(), reference.parameters(), strict=True)):
                other.copy_(whole(one))
                assert loaded[i].keys() == plain.state[other].keys()
                plain.state[other].update({key: tree_map(whole, value) for key, value in loaded[i].items()})
        train(module, optimizer, reference, plain, range(2, 4))
    else:
        for i, other in enumerate(reference.parameters()):
            for key, value in plain.state[other].items():
                torch.testing.assert_close(whole(loaded[i][key]), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "with_torch"),
    [("Muon", False), ("Muon", True), pytest.param("Adafactor", False, marks=pytest.mark.slow)],
)
def test_resume_on_fewer_ranks(tmp_path: Path, name: str, with_torch: bool) -> None:
    """A checkpoint of four ranks goes on on two, also with torch's own optimizer on DTensors."""
    POOL.run(4, save, {"path": str(tmp_path), "name": name}, 120.0)
    POOL.run(2, resume, {"path": str(tmp_path), "name": name, "with_torch": with_torch}, 120.0)


@on_ranks(2)
@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_what_a_training_loop_does_with_an_optimizer(rank, world, scheduled):
    """Groups, schedules, hooks, zero_grad and counts in a group work as before, and hooks run once a step. A scheduler
    from before the call warned that its optimizer's step was replaced, and asked to call it first."""
    module, reference = shard(stack(), mesh_1d()), stack()
    both = []
    for model in (module, reference):
        params = list(model.parameters())
        optimizer = Shampoo(params[:3], lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if model is module:
            fsdp2.use_full_params(optimizer, bucket_mb=0.0005)
        if scheduled == "after":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        both.append((optimizer, schedule, params))
    calls: list[str] = []
    both[0][0].register_step_pre_hook(lambda *unused: calls.append("before"))
    both[0][0].register_step_post_hook(lambda *unused: calls.append("after"))
    for step in range(4):
        set_gradients(module, reference, step)
        for optimizer, schedule, params in both:
            if step == 2:
                optimizer.add_param_group({"params": params[3:], "lr": 0.1})
            optimizer.step()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*lr_scheduler")
                schedule.step()
            optimizer.zero_grad()
        assert all(p.grad is None for group in both[0][0].param_groups for p in group["params"])
        assert_equal(module.parameters(), reference.parameters())
    assert calls == ["before", "after"] * 4
    assert [g["steps"] for g in both[0][0].param_groups] == [g["steps"] for g in both[1][0].param_groups] == [4, 2]
    assert both[0][0].param_groups[0]["params"][0] is next(module.parameters())


@on_ranks(2)
def test_a_gradient_on_one_rank_alone_is_refused_everywhere(rank, world):
    """Every rank raises before anything is sent or changed, and the next step works."""
    module = shard(stack(), mesh_1d())
    optimizer = fsdp2.use_full_params(OPTIMIZERS["Muon"](module.named_parameters()))
    module(rows(0)).sum().backward()
    before = [p.detach().to_local().clone() for p in module.parameters()]
    missing = module[1].weight
    grad = missing.grad
    if rank == 1:
        missing.grad = None
    with pytest.raises(RuntimeError, match=r"different gradients of 1\.weight.*Nothing was changed"):
        optimizer.step()
    assert all(torch.equal(a, p.detach().to_local()) for a, p in zip(before, module.parameters(), strict=True))
    missing.grad = grad
    optimizer.step()


@on_ranks(4)
def test_a_gradient_that_lacks_within_some_ranks_is_refused_everywhere(rank, world):
    """The ranks of another expert learn of it before they send anything: smaller sets of ranks are asked first."""
    mesh = mesh_of(2, 2, names=("shard", "experts"))
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    fsdp2.fully_shard(model[0], mesh=mesh_of(4, names=("all",)))
    fsdp2.fully_shard(model[1], mesh=mesh["shard"])
    optimizer = fsdp2.use_full_params(OPTIMIZERS["Muon"](model.named_parameters()))
    model(rows(0)).square().sum().backward()
    if rank == 0:
        model[1].weight.grad = None
    mine = r"different gradients of 1\.weight" if rank in (0, 2) else "some ranks lack a gradient"
    with pytest.raises(RuntimeError, match=mine + ".*Nothing was changed"):
        optimizer.step()


class Watched(torch.optim.SGD):
    """Notes the gradients that it steps by."""

    seen: list[weakref.ref[Tensor]]

    def step(self, closure: Any = None) -> Any:
        """Step."""
        self.seen = [weakref.ref(param.grad) for group in self.param_groups for param in group["params"]]
        return super().step(closure)


@on_ranks(2)
def test_gradients_of_a_step_are_gone_behind_it(rank, world):
    """Those of the matrices that a rank owns are whole, and stayed in memory until the next step."""
    module = shard(stack(), mesh_1d())
    optimizer = fsdp2.use_full_params(Watched(module.parameters(), lr=0.1))
    module(rows(0)).sum().backward()
    optimizer.step()
    assert optimizer.seen and not any(seen() is not None for seen in optimizer.seen)


@on_ranks(2)
def test_plans_of_parameters_that_were_removed_are_forgotten(rank, world):
    """Buckets refer to the parameters that they are for, and to the ranks that hold them."""
    module = shard(stack(), mesh_1d())
    optimizer = fsdp2.use_full_params(torch.optim.Adam(module.parameters()))
    module(rows(0)).sum().backward()
    optimizer.step()
    known = [weakref.ref(one) for one in gc.get_objects() if type(one) is RankSet]
    del optimizer.param_groups[0]["params"][0]
    optimizer.step()
    gc.collect()
    assert known and not any(one() is not None for one in known)


class Fails(torch.optim.Muon):
    """Raises for one matrix, so at one rank."""

    def step(self, closure: Any = None) -> Any:
        """Raise for a matrix of ten rows."""
        if any(p.shape[0] == 10 for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("ten rows")
        return super().step(closure)


@on_ranks(2)
def test_parameters_in_another_order_on_one_rank(rank, world):
    """Each rank sent its pieces of other matrices than the owner took them for: wrong values, without a word."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    shard_each(model, fsdp2, mesh=mesh_1d())
    params = list(model.parameters())
    optimizer = fsdp2.use_full_params(torch.optim.Adam(params if rank else params[::-1]))
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="ranks have the parameters in different orders; expected the same"):
        optimizer.step()


def gives_more(optimizer: Any, params: list[Any]) -> None:
    """A matrix that it did not have."""
    optimizer.add_param_group({"params": params[3:]})


def takes_some(optimizer: Any, params: list[Any]) -> None:
    """A matrix that it had."""
    del optimizer.param_groups[0]["params"][0]


@on_ranks(2, 4)
@pytest.mark.parametrize("change", [gives_more, takes_some])
@pytest.mark.parametrize("then", ["a step on all ranks", "step", "state_dict", "load_state_dict"])
@pytest.mark.parametrize("overlap", [False, True])
def test_other_parameters_since_the_last_step(rank, world, change, then, overlap):
    """If one rank alone has others, every rank raises. It gave its state to other owners, and waited for the ranks that
    did not.

    After that, the rank takes the change back, and the next step is the usual one.
    """
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    shard_each(model, fsdp2, mesh=mesh_1d())
    reference, params = copy.deepcopy(model), list(model.parameters())
    optimizer = fsdp2.use_full_params(torch.optim.Adam(params[:3]), overlap_backward=overlap, keep_full_params=overlap)
    plain = torch.optim.Adam([*reference.parameters()][:3])
    batch = torch.ones(2, 8)
    train_both = lambda: [module(batch).sum().backward() for module in (model, reference)]
    for _ in range(2):
        train_both()
        optimizer.step()
        plain.step()
    saved, groups = optimizer.state_dict(), [group | {"params": [*group["params"]]} for group in optimizer.param_groups]
    if then == "a step on all ranks":
        change(optimizer, params)
        change(plain, [*reference.parameters()])
    else:
        if rank == 1:
            change(optimizer, params)
        act = {"step": optimizer.step, "state_dict": optimizer.state_dict}
        act["load_state_dict"] = lambda: optimizer.load_state_dict(saved)
        here = "this rank's optimizer has other parameters than before"
        there = "other ranks gave their optimizer other parameters since the last step"
        with pytest.raises(RuntimeError, match=f"use_full_params: {here if rank == 1 else there}"):
            act[then]()
        optimizer.param_groups[:] = groups
    train_both()
    optimizer.step()
    plain.step()
    assert_weights(model, reference)


@on_ranks(3)
def test_an_error_at_one_owner_is_raised_everywhere(rank, world):
    """The owner raises the optimizer's error, the others say which rank raised; nobody waits."""
    module = shard(stack(), mesh_1d())
    optimizer = fsdp2.use_full_params(Fails(module.parameters()))
    module(rows(0)).sum().backward()
    try:
        optimizer.step()
    except (ArithmeticError, RuntimeError) as error:
        texts: list[Any] = [None] * world
        dist.all_gather_object(texts, f"{type(error).__name__}: {error}")
    assert sum(text.startswith("ArithmeticError: ten rows") for text in texts) == 1
    assert sum("Fails raised on rank" in text for text in texts) == world - 1


@on_ranks(2)
def test_state_of_others_says_where_it_is(rank, world):
    """The owner's is whole and plain; elsewhere its names are known, and reading a value names the owner."""
    module = shard(stack(), mesh_1d())
    optimizer = fsdp2.use_full_params(OPTIMIZERS["Muon"](module.parameters()))
    module(rows(0)).sum().backward()
    assert not optimizer.state
    optimizer.step()
    assert optimizer.state  # on each rank
    held = [p for p in module.parameters() if p in optimizer.state]
    assert 0 < len(held) < 4
    for p in module.parameters():
        if p in optimizer.state:
            assert optimizer.state[p]["momentum_buffer"].shape == p.shape
        else:
            entry = optimizer.state[p]
            assert list(entry) == ["momentum_buffer"] and len(entry) == 1 and "momentum_buffer" in entry
            for read in (entry.get, entry.__getitem__):
                with pytest.raises(RuntimeError, match=f"held by its owner, rank {1 - rank}.*state_dict"):
                    read("momentum_buffer")
            with pytest.raises(RuntimeError, match="held by its owner"):
                list(entry.values())
    stranger = nn.Parameter(torch.ones(2))
    with pytest.raises(KeyError):
        optimizer.state[stranger]


@on_ranks(2)
def test_plain_parameters_are_stepped_on_every_rank(rank, world):
    """Together with sharded ones in a group, and counted once."""
    module, reference = shard(stack(), mesh_1d()), stack()
    extra = [nn.Parameter(torch.full((3, 3), 2.0)) for _ in range(2)]
    optimizer = fsdp2.use_full_params(Shampoo([*module.parameters(), extra[0]]))
    plain = Shampoo([*reference.parameters(), extra[1]])
    for step in range(3):
        set_gradients(module, reference, step)
        for p in extra:
            p.grad = torch.eye(3) * (step + 1)
        optimizer.step()
        plain.step()
        assert_equal([*module.parameters(), extra[0]], [*reference.parameters(), extra[1]])


def test_what_is_refused():
    """By class, by argument, a closure at the step, and copies: these raised "cannot pickle ProcessGroup", or stepped
    on shards if the optimizer was not yet used."""
    weight = nn.Parameter(torch.randn(2, 2))
    for optimizer, text in (
        (torch.optim.LBFGS([weight]), "LBFGS.*closure.*Unchanged, it steps on DTensors if"),
        (torch.optim.SparseAdam([weight]), "SparseAdam.*sparse.*ignored_params"),
        (fsdp2.use_local_shards(torch.optim.SGD([weight], lr=1.0)), "use_local_shards was called.*on a new optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            fsdp2.use_full_params(optimizer)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got list"):
        fsdp2.use_full_params([weight])
    for size in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"bucket_mb must be a positive, finite number of MiB, got {size}"):
            fsdp2.use_full_params(torch.optim.Muon([weight]), bucket_mb=size)
    with pytest.raises(ValueError, match="batched=True, but torch.optim.Muon"):
        fsdp2.use_full_params(torch.optim.Muon([weight]), batched=True)
    with pytest.raises(ValueError, match="got a closure, expected none"):
        fsdp2.use_full_params(torch.optim.Muon([weight])).step(lambda: 1.0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot copy or pickle Muon.*call use_full_params.*state_dict\(\)"):
            copied(fsdp2.use_full_params(torch.optim.Muon([weight])))
    assert full_params.use_full_params is fsdp2.use_full_params


@on_ranks(2)
def test_memory_of_a_step_is_bounded_by_buckets(rank, world):
    """Beside state, a step needs what travels of two buckets and what is computed with of one, not the whole model.

    What is alive at once: whole gradients and parameters of a bucket (its size), what this rank sends and receives of
    it and of the next one (each at most its size), what is on its way back of it and of the one before (half), and
    Muon's own work on one matrix (six of it).
    """
    size, count = 64, 12
    torch.manual_seed(0)
    module = shard(nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count))), mesh_1d())
    matrix = size * size * 4
    optimizer = fsdp2.use_full_params(torch.optim.Muon(module.parameters()), bucket_mb=2 * matrix / (1 << 20))
    module(torch.randn(2, size)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    module(torch.randn(2, size)).sum().backward()
    live = LiveBytes(t for t in module.parameters())
    with live:
        before = live.now
        optimizer.step()
    bucket = 2 * matrix
    assert live.peak - before <= bucket + 2 * 2 * bucket + 2 * bucket + 6 * matrix
    assert live.peak - before < 2 * count * matrix


@on_ranks(2)
def test_cost_decides_who_owns(rank, world):
    """By default the expensive matrix has an owner for itself; where all cost the same, parameters are dealt out."""
    for cost, expected in ((None, {1, 3}), (lambda p: 1.0, {2})):
        torch.manual_seed(0)
        module = shard(nn.Sequential(*(nn.Linear(8, size, bias=False) for size in (64, 8, 8, 8))), mesh_1d())
        optimizer = fsdp2.use_full_params(torch.optim.Muon(module.parameters()), cost=cost)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert len(optimizer.state) in expected


@on_ranks(4)
@pytest.mark.parametrize("kind", ["pipeline", "one layer without tensor parallelism"])
def test_parameters_on_some_of_the_ranks(rank, world, kind):
    """The ranks that hold them get a process group of their own; making it failed (``ProcessGroup`` has no dict)."""
    reference = stack()
    if kind == "pipeline":
        mesh = mesh_of(2, 2, names=("pp", "dp"))
        module, reference = (model[:2] if rank < 2 else model[2:] for model in (stack(), reference))
        shard(module, mesh["dp"])
        inputs = lambda step: rows(step) if rank < 2 else rows(step)[:, :3]
    else:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        module, inputs = stack(), rows
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard(module, mesh["dp"])
    for name in ("Muon", "Adafactor"):
        optimizer = fsdp2.use_full_params(OPTIMIZERS[name](module.parameters()))
        plain = OPTIMIZERS[name](reference.parameters())
        for step in range(2):
            module(inputs(step)).square().sum().backward()
            for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                theirs.grad = mine.grad.full_tensor()
            step_both(optimizer, plain)
            assert_equal(module.parameters(), reference.parameters())
        saved = optimizer.state_dict()
        assert_same_state(saved, plain.state_dict())
        again = fsdp2.use_full_params(OPTIMIZERS[name](module.parameters()))
        again.load_state_dict(copy.deepcopy(saved))
        assert_same_state(again.state_dict(), saved)
