"""One program on one model three ways with the same seed and data: ours, torch's fully_shard, a single process.

Everything is compared as full tensors, so any mesh will do; how shards are placed is compared with torch's as well.
Most tests are one call of ``assert_parity`` and assertions on the ``Run`` of ours that it returns. The single process
never shards anything; under a mixed precision policy it casts a copy of the parameters for each forward and leaves the
cast-back to autograd.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tests.support import api
from tests.support.models import Case
from tests.support.remembered import remembered
from tests.support.sampling import ALL_VARIABLE
from tests.support.shapes import loss_of

SEED = 11
ROWS = 8
"""Rows of a whole batch: divisible by every world size used here."""
WIDTH = 8
STEPS = 3 if os.environ.get(ALL_VARIABLE) else 2
"""How long most programs train: in the second step momentum, and the order of units that the first has noted, count."""
FULL = MixedPrecisionPolicy()
LOW = 5e-3
"""From this tolerance on, what is compared was computed or sent with few bits."""

Prepare = Callable[[Any, Any], None]
"""``prepare(module, fsdp)`` calls ``fsdp.fully_shard`` and setters; ``fsdp`` is one of the two implementations."""
Build = Callable[[], nn.Module] | Case
"""What makes the model, with its inputs where they are not rows of ``WIDTH``."""
Seen = dict[str, Any]
"""Tensors by what they are, in the order in which they were noted."""


def stack(width: int = WIDTH, layers: int = 3) -> nn.Sequential:
    """Return linear layers of one width."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def shard_each(module: Any, fsdp: Any, **options: Any) -> None:
    """Make every child a unit, and the module one of the rest."""
    for unit in (*module.children(), module):
        fsdp.fully_shard(unit, **options)


def on_one_axis(module: Any, fsdp: Any, **options: Any) -> None:
    """Make every child a unit, and the module one of the rest, all of them over all ranks."""
    shard_each(module, fsdp, mesh=mesh_1d(), **options)


def on_two_axes(module: Any, fsdp: Any, **options: Any) -> None:
    """The same on a mesh of two replicas."""
    shard_each(module, fsdp, mesh=mesh_2d(), **options)


_meshes: weakref.WeakKeyDictionary[Any, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()


_device = "cpu"


def device() -> str:
    """Return the kind of device that meshes are made of: CPUs, unless ``on_device`` says otherwise."""
    return _device


@contextlib.contextmanager
def on_device(kind: str) -> Iterator[None]:
    """Make meshes of devices of this kind inside the block, where results are as exact as on a CPU."""
    global _device
    before, _device = _device, kind
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        try:
            yield
        finally:
            _device = before


def mesh_of(*sizes: int, names: Sequence[str] = ()) -> DeviceMesh:
    """Return the mesh of these sizes and names: one object per default process group.

    DTensor's caches hand out specs with whichever of several equal meshes they saw first, also one whose process
    groups have been destroyed since, and torch's fully_shard asks for the same object.
    """
    world = dist.group.WORLD
    if world not in _meshes:
        _clear_sharding_prop_cache()
        _meshes[world] = {}
    key = (device(), sizes, tuple(names))
    if key not in _meshes[world]:
        _meshes[world][key] = init_device_mesh(device(), sizes, mesh_dim_names=tuple(names) or None)
    return _meshes[world][key]


def mesh_1d() -> DeviceMesh:
    """Return the mesh over all ranks."""
    return mesh_of(dist.get_world_size(), names=("shard",))


def mesh_2d(*names: str) -> DeviceMesh:
    """Return a (2, ranks / 2) mesh with these dimension names."""
    return mesh_of(2, dist.get_world_size() // 2, names=names or ("replicate", "shard"))


def full(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of the whole tensor on every rank."""
    if tensor is None:
        return None
    return (tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()


def placed_like(whole: Tensor, param: Tensor) -> Tensor:
    """Return ``whole``, which is alike on all ranks, placed as ``param`` is: as a DTensor if that is one."""
    return distribute_tensor(whole, param.device_mesh, param.placements) if isinstance(param, DTensor) else whole


@torch.no_grad()  # then DTensor hands out its local tensor as it is
def fulls(named: Mapping[Any, Tensor | None]) -> dict[Any, Tensor | None]:
    """Return copies of whole tensors on every rank, as ``full`` does; what lies on a mesh of all ranks is gathered at
    once, which costs a fraction of a collective for each."""
    values = {name: full(tensor) for name, tensor in named.items() if not _is_cut(tensor)}
    cut: dict[torch.dtype, dict[Any, DTensor]] = {}
    for name, tensor in named.items():
        if name not in values:
            cut.setdefault(tensor.dtype, {})[name] = tensor.detach()
    for tensors in cut.values():
        values |= _gather(tensors)
    return {name: values[name] for name in named}


_ranks: weakref.WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[DeviceMesh], list[int]]]]
_ranks = weakref.WeakKeyDictionary()


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh in its order.

    A mesh works them out anew whenever it is asked: that was a tenth of what comparing cost.
    """
    known = _ranks.setdefault(dist.group.WORLD, {})
    if id(mesh) not in known or known[id(mesh)][0]() is not mesh:
        known[id(mesh)] = weakref.ref(mesh), mesh.mesh.flatten().tolist()
    return known[id(mesh)][1]


def _is_cut(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor on a mesh of all ranks in their order, and its pieces are where ``_box`` says."""
    if not isinstance(tensor, DTensor) or any(p.is_partial() for p in tensor.placements):
        return False
    if sum(_is_strided(p) for p in tensor.placements) > 1 or type(tensor.to_local()) is not Tensor:
        return False
    return _ranks_of(tensor.device_mesh) == list(range(dist.get_world_size()))


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor")


def _box(tensor: DTensor, sizes: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Return where the piece at a ``coordinate`` of the mesh lies in the whole tensor: (start, length) by dimension.

    Mesh dimensions cut one after the other, as ``torch.chunk`` does; a strided one cuts what the others have left.
    """
    box = [(0, size) for size in tensor.shape]
    cuts = [(p, size, index) for p, size, index in zip(tensor.placements, sizes, coordinate) if not p.is_replicate()]
    for placement, ranks, index in sorted(cuts, key=lambda cut: _is_strided(cut[0])):
        start, length = box[placement.dim]
        each = -(-length // ranks)
        first = min(each * index, length)
        box[placement.dim] = start + first, min(each, length - first)
    return box


def _gather(tensors: Mapping[Any, DTensor]) -> dict[Any, Tensor]:
    """Return whole tensors of one dtype; each rank sends its pieces one behind the other, padded to the longest."""
    world = dist.get_world_size()
    whole = {name: tensor.to_local().new_empty(tensor.shape) for name, tensor in tensors.items()}
    places: list[list[Tensor]] = [[] for _ in range(world)]  # parts of the whole tensors by rank
    for name, tensor in tensors.items():
        sizes = tuple(tensor.device_mesh.shape)
        for rank, coordinate in enumerate(product(*map(range, sizes))):
            part = whole[name]
            for dim, (start, length) in enumerate(_box(tensor, sizes, coordinate)):
                part = part.narrow(dim, start, length)
            places[rank].append(part)
    longest = max(sum(part.numel() for part in parts) for parts in places)
    sent = torch.cat([tensor.to_local().reshape(-1) for tensor in tensors.values()])
    own = places[dist.get_rank()]
    assert [part.shape for part in own] == [tensor.to_local().shape for tensor in tensors.values()], "other pieces"
    rows = sent.new_empty(world * longest)
    dist.all_gather_into_tensor(rows, torch.nn.functional.pad(sent, (0, longest - sent.numel())))
    for row, parts in zip(rows.chunk(world), places):
        end = 0
        for part in parts:
            begin, end = end, end + part.numel()
            part.copy_(row[begin:end].view(part.shape))
    return whole


def rows_of(inputs: tuple[Any, ...], index: int, count: int) -> tuple[Any, ...]:
    """Return one of ``count`` parts of a whole batch, as leaves."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().chunk(count)[index].requires_grad_(value.requires_grad)

    return pytree.tree_map(part, inputs)


def low(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with every floating point tensor in it in ``dtype``."""
    if dtype is None:
        return value
    cast = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
    return pytree.tree_map(cast, value)


def forward_alone(module: nn.Module, case: Case, inputs: tuple[Any, ...], policy: MixedPrecisionPolicy) -> Any:
    """Return the output of an unsharded module under a mixed precision policy that holds for the whole model."""
    if policy.param_dtype is None and policy.output_dtype is None:
        return case.call(module, inputs)
    # Each parameter once, also if it is tied: its gradients are added up as they were computed.
    once = {p: low(p, policy.param_dtype) for p in module.parameters()}
    cast = {name: once[p] for name, p in module.named_parameters(remove_duplicate=False)}
    if policy.cast_forward_inputs:
        inputs = low(inputs, policy.param_dtype)
    args, keywords = ((), case.keywords(inputs)) if case.keywords else (inputs, {})
    return low(functional_call(module, cast, args, keywords, tie_weights=False), policy.output_dtype)


def batch(step: int) -> tuple[Tensor]:
    """Return the whole batch of a step for a model that takes rows of ``WIDTH``."""
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step)),)


STACK = Case(stack, batch)


class LocalSGD(torch.optim.SGD):
    """The same steps on this rank's pieces: DTensor's operators were a fifth of what a comparison costs.

    On meshes of several dimensions DTensor tries all there is before it adds two tensors: a second for each rank.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step, where gradients lie as their parameters do."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert _where(parameter.grad) == _where(parameter)
                state, grad = self.state[parameter], _local(parameter.grad)
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = grad.clone()
                else:
                    state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                _local(parameter).add_(state["momentum_buffer"], alpha=-group["lr"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Run:
    """One of the runs: the model, its optimizer, this rank's rows, and what was seen.

    SGD with momentum is linear in the gradients, so small errors stay small. It steps on local tensors; tests of
    optimizers give a run their own.
    """

    module: Any
    fsdp: ModuleType | None
    part: tuple[int, int]
    case: Case = STACK
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    seen: dict[str, Tensor | None] = field(default_factory=dict)
    placed: dict[str, object] = field(default_factory=dict)
    notes: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = LocalSGD(trainable or self.module.parameters(), lr=0.1, momentum=0.9)

    @property
    def units(self) -> list[Any]:
        """The sharded modules, root first; none in a single process, so that loops over them do nothing there."""
        return [m for m in self.module.modules() if self.fsdp is not None and isinstance(m, self.fsdp.FSDPModule)]

    @property
    def root(self) -> list[Any]:
        """The sharded root alone."""
        return self.units[:1]

    def configure(self, prepare: Prepare) -> None:
        """Call setters, where there are any to call."""
        if self.fsdp is not None:
            prepare(self.module, self.fsdp)

    def arguments(self, step: int) -> tuple[Any, ...]:
        """Return this rank's rows of everything that the model takes."""
        return rows_of(self.case.inputs(step), *self.part)

    def inputs(self, step: int) -> Tensor:
        """Return this rank's rows of a step's batch, for a model that takes one tensor."""
        return self.arguments(step)[0]

    def forward(self, step: int) -> Any:
        """Return the model's output for this rank's rows."""
        if self.fsdp is None:
            return forward_alone(self.module, self.case, self.arguments(step), self.policy)
        output = self.case.call(self.module, self.arguments(step))
        return output.full_tensor() if isinstance(output, DTensor) else output

    def note_loss(self, loss: Tensor) -> Tensor:
        """Note the mean of a loss over ranks and return the loss."""
        total = loss.detach().clone()
        if self.fsdp is not None:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        self.seen[f"loss {len(self.seen)}"] = total
        return loss

    def loss(self, step: int) -> Tensor:
        """Return the loss of this rank's rows and note it."""
        return self.note_loss(loss_of(self.forward(step)))

    def backward(self, step: int) -> None:
        """Run forward and backward."""
        self.loss(step).backward()

    def record(self) -> None:
        """Note all gradients, which the shards hold; a forward without a backward may have left full parameters."""
        for unit in self.units:
            unit.reshard()
        count = len(self.seen)
        parameters = dict(self.module.named_parameters())
        for name, gradient in fulls({name: parameter.grad for name, parameter in parameters.items()}).items():
            self.seen[f"gradient of {name} {count}"] = gradient
            self.placed[name] = _placed(parameters[name])

    def update(self) -> None:
        """Note the gradients, step, and drop them."""
        self.record()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> Run:
        """Note the weights and buffers and return the run."""
        for unit in self.units:
            unit.reshard()
        for kind, values in ("weight", self.module.named_parameters()), ("buffer", self.module.named_buffers()):
            self.seen |= {f"{kind} {name}": value for name, value in fulls(dict(values)).items()}
        return self


def _placed(parameter: Tensor) -> object:
    return None if not isinstance(parameter, DTensor) else (_where(parameter), parameter.to_local().stride())


def _where(tensor: Tensor) -> object:
    if not isinstance(tensor, DTensor):
        return None
    return tensor.placements, tuple(tensor.device_mesh.shape), tuple(tensor.to_local().shape)


Program = Callable[[Run], None]


def train(run: Run) -> None:
    """Train for a few steps."""
    for step in range(STEPS):
        run.backward(step)
        run.update()


def accumulate(run: Run, batches: int = 2, setter: str = "set_requires_gradient_sync", **how: object) -> None:
    """Train on micro-batches, of which the last one of each step communicates what ``setter`` is about."""
    for step in range(STEPS):
        for part in range(batches):
            last = part == batches - 1
            run.configure(lambda module, fsdp, last=last: getattr(module, setter)(last, **how))
            run.backward(batches * step + part)
        run.update()


def setting(setter: Prepare, when: str) -> Program:
    """Return the program that trains with a setter called "before" or "after" the first iteration."""

    def program(run: Run) -> None:
        for step in range(STEPS):
            if (when == "before") == (step == 0) and step < 2:
                run.configure(setter)
            run.backward(step)
            run.update()

    return program


def play(
    fsdp: ModuleType | None,
    prepare: Prepare,
    build: Build = stack,
    program: Program = train,
    part: tuple[int, int] | None = None,
    policy: MixedPrecisionPolicy = FULL,
) -> Run:
    """Run a program with one implementation, or on the whole batch without any."""
    case = build if isinstance(build, Case) else Case(build, batch)
    torch.manual_seed(SEED)
    module = case.build()
    if fsdp is not None:
        prepare(module, fsdp)
    own = part or (dist.get_rank(), dist.get_world_size())
    run = Run(module, fsdp, (0, 1) if fsdp is None else own, case, policy)
    program(run)
    return run.finish()


def assert_parity(
    prepare: Prepare,
    *,
    build: Build = stack,
    program: Program = train,
    part: tuple[int, int] | None = None,
    policy: MixedPrecisionPolicy = FULL,
    against: Iterable[str] = ("torch", "alone"),
    tolerance: float = 2e-5,
) -> Run:
    """Assert that ours shows what torch's and a single process show, and return the run of ours.

    All runs end before the first comparison, so that a difference on one rank leaves no other rank waiting. Where
    torch's cannot do it, compare with a single process alone. ``policy`` is what the single process computes with.
    """
    ours = play(api.ours, prepare, build, program, part)
    theirs = play(api.theirs, prepare, build, program, part) if "torch" in against else None
    alone = None
    if "alone" in against:
        alone = remembered((build, program, policy), lambda: play(None, prepare, build, program, policy=policy).seen)
    assert theirs or alone, "there is nothing to compare with"
    for whose, other in (("torch's", theirs and theirs.seen), ("a single process's", alone)):
        if other is not None:
            assert_same(ours.seen, other, whose, tolerance)
    if theirs is not None:
        assert ours.placed == theirs.placed
    return ours


def beside_one_process(
    build: Callable[[], nn.Module],
    units: Callable[[Any], Iterable[Any]] = nn.Module.children,
    fsdp: Any = api.ours,
    **options: object,
) -> tuple[Any, Any]:
    """Return a model whose units and the rest are sharded over all ranks unless ``options`` say otherwise, and the same
    model in one process, for programs that are none of a ``Run``."""
    torch.manual_seed(SEED)
    alone = build()
    module = copy.deepcopy(alone)
    _shard(module, fsdp, units, options)
    return module, alone


def sharded(
    build: Callable[[], nn.Module] = stack,
    fsdp: Any = api.ours,
    units: Callable[[Any], Iterable[Any]] = nn.Module.children,
    **options: Any,
) -> Any:
    """Return a new model whose units and the rest are sharded over all ranks unless ``options`` say otherwise."""
    torch.manual_seed(SEED)
    module = build()
    _shard(module, fsdp, units, options)
    return module


def _shard(module: nn.Module, fsdp: Any, units: Callable[[Any], Iterable[Any]], options: dict[str, Any]) -> None:
    options = options if "mesh" in options else {"mesh": mesh_1d(), **options}
    for unit in (*units(module), module):
        fsdp.fully_shard(unit, **options)


def assert_gradients(module: nn.Module, alone: nn.Module, where: object = "") -> None:
    """Assert that the gradients of a sharded module are those of a module in a single process, which has the same
    parameters in the same order."""
    got = fulls({name: parameter.grad for name, parameter in module.named_parameters()})
    for (name, gradient), expected in zip(got.items(), alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad, msg=lambda text, n=name: f"{where} {n}: {text}")


def assert_weights(module: nn.Module, other: nn.Module, where: object = "") -> None:
    """Assert that two modules, of which either may be sharded, have the same weights in the same order."""
    got, expected = (fulls(dict(one.named_parameters())) for one in (module, other))
    for (name, weight), value in zip(got.items(), expected.values(), strict=True):
        torch.testing.assert_close(weight, value, msg=lambda text, n=name: f"{where} {n}: {text}")


def step_alike(
    module: nn.Module, alone: nn.Module, loss: Callable[[Any], Tensor], where: object = "", *, lr: float | None = 0.1
) -> None:
    """Assert that a sharded module and the same in one process have equal losses and gradients. By these both step and
    drop them, unless ``lr`` is None."""
    losses = [loss(model) for model in (module, alone)]
    torch.testing.assert_close(*losses, msg=lambda text: f"{where} loss: {text}")
    for one in losses:
        one.backward()
    assert_gradients(module, alone, where)
    for model in (module, alone) if lr is not None else ():
        torch.optim.SGD(model.parameters(), lr).step()
        model.zero_grad()


def assert_same(got: Seen, expected: Seen, whose: str, tolerance: float = 2e-5) -> None:
    """Assert that two runs have seen the same numbers; each kind is measured by itself."""
    assert list(got) == list(expected)
    kinds: dict[object, Seen] = {}
    for name, value in expected.items():
        kinds.setdefault(_kind(name), {})[name] = value
    for values in kinds.values():
        assert_close_together(got, values, whose, tolerance)


def _kind(name: str) -> object:
    """Return what tensors are noted together: gradients at one time, all losses, all weights."""
    words = name.split()
    return (words[0], words[-1]) if words[0] == "gradient" else words[0]


def assert_close_together(got: Seen, expected: Seen, whose: str, tolerance: float) -> None:
    """Assert that tensors agree, up to ``tolerance`` of the largest magnitude in each.

    That counts as at least a hundredth, where few bits are kept a third, of the largest in all of them: a small sum of
    large rounded numbers is not more exact than they.
    """
    sizes = {name: _magnitude(value) for name, value in expected.items()}
    floor = (0.01 if tolerance < LOW else 0.3) * max(sizes.values(), default=0.0)
    for name, value in expected.items():
        assert_close(got[name], value, f"{name} against {whose}", tolerance * max(sizes[name], floor))


def _magnitude(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else value.double().abs().max().item()


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str, allowed: float) -> None:
    """Assert that no element is off by more than ``allowed``; None equals only None."""
    if actual is None or expected is None:
        assert actual is None and expected is None, f"{what}: got {actual}, expected {expected}"
        return
    assert actual.shape == expected.shape, f"{what}: got shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: got {actual.dtype}, expected {expected.dtype}"
    error = (actual.double().cpu() - expected.double().cpu()).abs().max().item() if expected.numel() else 0.0
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}\ngot {actual}\nexpected {expected}"


def mean_output(module: nn.Module, inputs: Tensor) -> Tensor:
    """The usual loss."""
    return module(inputs).square().mean()


def losses_of_one_process(model: nn.Module, loss: Callable[[int], Tensor], steps: int, lr: float) -> list[float]:
    """Train a model on the ``loss`` of each step by AdamW and return the losses, for programs of several processes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        value = loss(step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def trains_like_one_process(
    build: Build,
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_output,
    units: Callable[[nn.Module], Iterable[Any]] = nn.Module.children,
    **options: object,
) -> None:
    """Train with a ``loss`` of its own, units and the rest sharded, and expect what a single process comes to."""

    def prepare(module: Any, fsdp: Any) -> None:
        for unit in (*units(module), module):
            fsdp.fully_shard(unit, mesh=mesh_1d(), **options)

    def program(run: Run) -> None:
        for step in range(STEPS):
            run.note_loss(loss(run.module, run.inputs(step))).backward()
            run.update()

    assert_parity(prepare, build=build, program=program, against=("alone",))
