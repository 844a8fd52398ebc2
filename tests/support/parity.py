"""One program on one model three ways with the same seed and data: ours, torch's fully_shard, a single process.

Everything is compared as full tensors, so any mesh will do; how shards are placed is compared with torch's as well.
Most tests of this folder are one call of ``assert_parity`` and assertions on the ``Run`` of ours that it returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import api
from tests.support.remembered import remembered

SEED = 11
ROWS = 8
"""Rows of a whole batch: divisible by every world size used here."""
WIDTH = 8

Prepare = Callable[[Any, Any], None]
"""``prepare(module, fsdp)`` calls ``fsdp.fully_shard`` and setters; ``fsdp`` is one of the two implementations."""


def stack(width: int = WIDTH, layers: int = 3) -> nn.Sequential:
    """Return linear layers of one width."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def shard_each(module: Any, fsdp: Any, **options: Any) -> None:
    """Make every child a unit, and the module one of the rest."""
    for unit in (*module.children(), module):
        fsdp.fully_shard(unit, **options)


_meshes: weakref.WeakKeyDictionary[Any, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of(*sizes: int, names: Sequence[str] = ()) -> DeviceMesh:
    """Return the mesh of these sizes and names: one object per default process group.

    DTensor's caches hand out specs with whichever of several equal meshes they saw first, also one whose process
    groups have been destroyed since, and torch's fully_shard asks for the same object.
    """
    world = dist.group.WORLD
    if world not in _meshes:
        _clear_sharding_prop_cache()
        _meshes[world] = {}
    key = (sizes, tuple(names))
    if key not in _meshes[world]:
        _meshes[world][key] = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names) or None)
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


def fulls(named: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return copies of whole tensors on every rank, as ``full`` does; what is cut over all ranks is gathered at once,
    which costs a fraction of a collective for each."""
    values = {name: full(tensor) for name, tensor in named.items() if not _is_cut(tensor)}
    cut: dict[torch.dtype, dict[str, DTensor]] = {}
    for name, tensor in named.items():
        if name not in values:
            cut.setdefault(tensor.dtype, {})[name] = tensor.detach()  # type: ignore[index, union-attr, assignment]
    for tensors in cut.values():
        values |= _gather(tensors)
    return {name: values[name] for name in named}


def _is_cut(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor that is cut once, over all ranks in their order."""
    if not isinstance(tensor, DTensor) or type(tensor.placements[0]) is not Shard:
        return False
    return tensor.device_mesh.mesh.tolist() == list(range(dist.get_world_size()))


def _gather(tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Return whole tensors of one dtype; each rank sends its pieces, padded to those of the first rank."""
    world, sent, shapes = dist.get_world_size(), [], {}
    for name, tensor in tensors.items():
        dim, local = tensor.placements[0].dim, tensor.to_local()  # type: ignore[attr-defined]
        missing = -(-tensor.shape[dim] // world) - local.shape[dim]
        padding = local.new_zeros([missing if index == dim else size for index, size in enumerate(local.shape)])
        sent.append(torch.cat([local, padding], dim).flatten())
        shapes[name] = dim, torch.Size(size + missing * (i == dim) for i, size in enumerate(local.shape))
    row = torch.cat(sent)
    rows = row.new_empty(world * row.numel())
    dist.all_gather_into_tensor(rows, row)
    whole, offset = {}, 0
    for name, (dim, shape) in shapes.items():
        pieces = [part[offset : offset + shape.numel()].view(shape) for part in rows.chunk(world)]
        whole[name] = torch.cat(pieces, dim).narrow(dim, 0, tensors[name].shape[dim]).clone()
        offset += shape.numel()
    return whole


@dataclass
class Run:
    """One of the runs: the model, its optimizer, this rank's rows, and what was seen."""

    module: Any
    fsdp: ModuleType | None
    part: tuple[int, int]
    seen: dict[str, Tensor | None] = field(default_factory=dict)
    placed: dict[str, object] = field(default_factory=dict)
    notes: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)

    def configure(self, prepare: Prepare) -> None:
        """Call setters, where there are any to call."""
        if self.fsdp is not None:
            prepare(self.module, self.fsdp)

    def inputs(self, step: int) -> Tensor:
        """Return this rank's rows of a step's batch."""
        index, count = self.part
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step))
        return batch.chunk(count)[index]

    def loss(self, step: int) -> Tensor:
        """Return the loss of this rank's rows and note the mean over ranks."""
        output = self.module(self.inputs(step))
        loss = (output.full_tensor() if isinstance(output, DTensor) else output).square().mean()
        total = loss.detach().clone()
        if self.fsdp is not None:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        self.seen[f"loss {len(self.seen)}"] = total
        return loss

    def backward(self, step: int) -> None:
        """Run forward and backward."""
        self.loss(step).backward()

    def record(self) -> None:
        """Note all gradients."""
        if self.fsdp is not None:
            for module in self.module.modules():
                if isinstance(module, self.fsdp.FSDPModule):
                    module.reshard()
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
        """Note the weights and return the run."""
        for name, value in fulls(dict(self.module.named_parameters())).items():
            self.seen[f"weight {name}"] = value
        return self


def _placed(parameter: Tensor) -> object:
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return parameter.placements, tuple(mesh.shape), tuple(parameter.to_local().shape), parameter.to_local().stride()


Program = Callable[[Run], None]


def train(run: Run) -> None:
    """Train for three steps."""
    for step in range(3):
        run.backward(step)
        run.update()


def setting(setter: Prepare, when: str) -> Program:
    """Return the program that trains with a setter called "before" or "after" the first iteration."""

    def program(run: Run) -> None:
        for step in range(3):
            if (when == "before") == (step == 0) and step < 2:
                run.configure(setter)
            run.backward(step)
            run.update()

    return program


def play(
    fsdp: ModuleType | None,
    prepare: Prepare,
    build: Callable[[], nn.Module] = stack,
    program: Program = train,
    part: tuple[int, int] | None = None,
) -> Run:
    """Run a program with one implementation, or on the whole batch without any."""
    torch.manual_seed(SEED)
    module = build()
    if fsdp is not None:
        prepare(module, fsdp)
    own = part or (dist.get_rank(), dist.get_world_size())
    run = Run(module, fsdp, (0, 1) if fsdp is None else own)
    program(run)
    return run.finish()


def assert_parity(
    prepare: Prepare,
    *,
    build: Callable[[], nn.Module] = stack,
    program: Program = train,
    part: tuple[int, int] | None = None,
    against: Iterable[str] = ("torch", "alone"),
    tolerance: float = 1e-5,
) -> Run:
    """Assert that ours shows what torch's and a single process show, and return the run of ours.

    All runs end before the first comparison, so that a difference on one rank leaves no other rank waiting. Where
    torch's cannot do it, compare with a single process alone.
    """
    ours = play(api.ours, prepare, build, program, part)
    theirs = play(api.theirs, prepare, build, program, part) if "torch" in against else None
    alone = None
    if "alone" in against:
        alone = remembered((build, program), lambda: play(None, prepare, build, program).seen)
    assert theirs or alone, "there is nothing to compare with"
    for whose, other in (("torch's", theirs and theirs.seen), ("a single process's", alone)):
        if other is not None:
            assert_same(ours.seen, other, whose, tolerance)
    if theirs is not None:
        assert ours.placed == theirs.placed
    return ours


def assert_same(got: dict[str, Any], expected: dict[str, Any], whose: str, tolerance: float = 1e-5) -> None:
    """Assert that two runs have seen the same numbers."""
    assert list(got) == list(expected)
    for name, value in expected.items():
        mine = got[name]
        assert (mine is None) == (value is None), f"{name}: got {mine}, {whose} is {value}"
        if mine is not None:
            message = lambda text, name=name: f"{name} differs from {whose}: {text}"
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance, msg=message)


Model = Callable[[], nn.Module]


Loss = Callable[[nn.Module, Tensor], Tensor]


def mean_output(module: nn.Module, inputs: Tensor) -> Tensor:
    """The usual loss."""
    return module(inputs).square().mean()


def trains_like_one_process(
    world: int,
    rank: int,
    build: Model,
    loss: Loss = mean_output,
    units: Callable[[nn.Module], Iterable[Any]] = nn.Module.children,
    **options: object,
) -> None:
    """Train three steps, units and the rest sharded, and expect what a single process on all rows comes to."""
    torch.manual_seed(0)
    reference = build()
    torch.manual_seed(0)
    module = build()
    for unit in (*units(module), module):
        api.ours.fully_shard(unit, mesh=mesh_1d(), **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (reference, module)]
    for step in range(3):
        batches = [torch.sin(torch.arange(24.0).view(3, 8) * (step + 1) + r) for r in range(world)]
        for rows in batches:
            (loss(reference, rows) / world).backward()
        loss(module, batches[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), whole in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), whole.detach(), msg=name)
