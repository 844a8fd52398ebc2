"""The ranks of a parameter: one shard axis and one replicate axis. An absent axis has size 1."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._torch.collectives import named_group
from fsdp2._torch.tensors import concatenate_meshes, flatten_mesh, mesh_order, without_dispatch
from fsdp2._warn import warn
from fsdp2.policies import DataParallelMeshDims
from fsdp2.sharding.platform import device_of, platform

__all__ = [
    "Axis",
    "DataParallelMesh",
    "default_mesh",
    "listed_ranks",
    "own_group",
    "regroup",
    "regroup_within",
    "shard_first",
]


_NCCL = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")


def listed_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of ``mesh`` in the order of its elements. This works under FakeTensorMode too."""
    with without_dispatch():
        return mesh.mesh.flatten().tolist()


@dataclass(frozen=True)
class Axis:
    """One mesh dimension for communication: its process group, size, this process's rank, and the backend's name."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    backend: str

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """Return the axis of dimension ``dim`` of ``mesh``.

        Raises:
            ValueError: The dimension has no process group, or its group was destroyed.
        """
        try:
            group = mesh.get_group(dim)
        except RuntimeError as error:
            raise ValueError(
                f"fully_shard: dimension {dim} of the mesh {mesh} has no process group ({error}); expected a mesh of "
                "the present default process group: make it with init_device_mesh after init_process_group"
            ) from error
        return cls.of_group(group, mesh.device_type)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, device_type: str) -> Axis:
        """Return the axis of ``group`` for tensors on devices of that type."""
        return cls(group, group.size(), group.rank(), platform().backend(group, device_type))

    @property
    def is_nccl(self) -> bool:
        """True if the backend is NCCL, which has several names in torch 2.15."""
        return self.backend in _NCCL

    @property
    def reaches_nobody(self) -> bool:
        """True if there is no other rank, or only those of a fake process group, whatever backend that counts as."""
        return self.size == 1 or (self.group is not None and dist.get_backend(self.group) == "fake")

    @property
    def coalesces(self) -> bool:
        """True if the backend runs several gathers in one launch; gloo runs them concurrently instead."""
        return self.backend != "gloo"

    def with_own_group(self) -> Axis:
        """Return an axis of the same ranks, in the same order, with a new process group. All of them must call this."""
        assert self.group is not None
        return replace(self, group=own_group(dist.get_process_group_ranks(self.group), "reduce_scatter"))


# The number of groups made under each name, for each default process group: a name must be new in the store.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def own_group(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``, in this order.

    Each of these ranks must call this, and equally often for each ``purpose``. Other ranks need not call it.
    """
    world = dist.group.WORLD
    assert world is not None
    name = f"fsdp2_{purpose}_{hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()}"
    made = _made.setdefault(world, Counter())
    made[name] += 1
    return named_group(list(ranks), f"{name}_{made[name]}")


_numbers = count()
_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _present_world() -> int:
    """Return a number for the present default process group, which no other one has.

    It is part of the keys of what is cached on a mesh. DTensor's caches keep meshes, and return them for equal ones
    even after their process groups were destroyed and new ones were made.
    """
    world = dist.group.WORLD
    assert world is not None
    return _worlds.setdefault(world, next(_numbers))


_ABSENT = Axis(None, 1, 0, "none")


@dataclass(frozen=True)
class DataParallelMesh:
    """The mesh of one call: parameters are sharded over ``shard``, gradients summed over ``shard`` and ``replicate``.

    ``mesh`` has only the data-parallel dimensions: (shard), (replicate, shard) or (replicate). A replicate axis may
    stand for two dimensions. With ``dp_mesh_dims``, ``spmd`` is the mesh that parameters already lie on, and ``dims``
    names its data-parallel dimensions.

    With ``shard_over_replicas``, ``sharded_twice`` is a mesh (shard, replicate) of the same ranks: each rank's piece
    for the shard axis is sharded once more, over the replicate axis, so no two ranks keep the same elements.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device
    spmd: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    sharded_twice: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check that replicas hold the same pieces: otherwise gradients of different pieces would be summed.

        Warn if a rank's place on the mesh differs from its rank in the process group, which determines its piece.

        Raises:
            ValueError: The process groups of the shard axis sort ranks that the mesh lists in another order.
        """
        place: Sequence[int] = self.mesh.get_coordinate() or ()
        axes = [(self.shard, -1), (self.replicate, 0)] if self.has_portions else [(self.shard, -1)]
        for axis, dim in axes:
            if axis.group is None or not place or place[dim] == axis.group.rank():
                continue
            warn(
                f"fully_shard: rank {dist.get_rank()} has place {place[dim]} on the mesh {self.mesh}, but "
                f"{axis.group.rank()} in its process group, which sorts ranks. Parameters and gradients are right, but "
                "torch.distributed.checkpoint takes the place of a shard from the mesh, so it saves and loads this "
                "rank's shard as another's; list the ranks in ascending order, or make the mesh with "
                "preserve_rank_order=True (torch 2.15)"
            )
        if self.shard.group is None or self.mesh.ndim == 1 or mesh_order(self.mesh):
            return  # no columns, or process groups in the mesh's own order
        with without_dispatch():  # under FakeTensorMode too
            rows: list[list[int]] = self.mesh.mesh.tolist()
        if len({tuple(sorted(range(len(row)), key=row.__getitem__)) for row in rows}) > 1:
            raise ValueError(
                f"fully_shard: the mesh {self.mesh} lists the ranks {rows}, but its process groups sort "
                "them, so the ranks of one column, which average their gradients, hold different pieces; list the "
                "ranks of every row in ascending order, or make the mesh with preserve_rank_order=True (torch 2.15)"
            )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataParallelMesh:
        """Return the data-parallel mesh for ``mesh``: 1D shards; 2D replicates over dimension 0 and shards over 1.

        With ``dims``, parameters already lie on ``mesh``, and ``dims`` names its data-parallel dimensions.

        Raises:
            TypeError: ``mesh`` is not a DeviceMesh.
            ValueError: ``mesh`` has more than two dimensions, this rank is not in it, ``dims`` has names that it
                lacks, or replicas would hold different pieces.
            AssertionError: ``mesh`` is 2D without dimension names (torch's contract).
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"fully_shard: mesh must be a DeviceMesh, got {type(mesh).__name__}; make one with "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"fully_shard: rank {dist.get_rank()} is not part of the mesh {mesh}; call fully_shard only on the "
                "ranks of the mesh"
            )
        if dims is not None:
            return cls._from_named(mesh, dims)
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; name the data-parallel dimensions of a "
                "larger one with dp_mesh_dims, or pass a slice of it such as mesh['dp']"
            )
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        _warn_of_other_names(mesh)
        replicate = Axis.of(mesh, 0) if mesh.ndim == 2 else _ABSENT
        return cls(mesh, Axis.of(mesh, mesh.ndim - 1), replicate, _device_of(mesh))

    @classmethod
    def _from_named(cls, mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMesh:
        shard_names, replicate_names = dims.shard_names, dims.replicate_names
        if not shard_names and not replicate_names:
            raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
        if mesh.mesh_dim_names is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        for name in (*shard_names, *replicate_names):
            if name not in mesh.mesh_dim_names:
                raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
        parts = [_submesh(mesh, names) for names in (replicate_names, shard_names) if names]
        dp_mesh = parts[0] if len(parts) == 1 else concatenate_meshes(parts)
        replicate = Axis.of(parts[0], 0) if replicate_names else _ABSENT
        shard = Axis.of(parts[-1], 0) if shard_names else _ABSENT
        return cls(dp_mesh, shard, replicate, _device_of(mesh), mesh, dims)

    def replicated(self) -> DataParallelMesh:
        """Return the same ranks without a shard axis: parameters are whole on each, and gradients are all-reduced.

        Every rank of the mesh must call it, because a 2D mesh gets a new process group.
        """
        if self.shard.group is None:
            return self
        if self.spmd is not None and self.dims is not None:
            names = (*self.dims.replicate_names, *self.dims.shard_names)
            own = tuple(name for name in self.spmd.mesh_dim_names or () if name in names)
            return self._from_named(self.spmd, DataParallelMeshDims(replicate=own))
        line = self.mesh
        if line.ndim == 2:
            line = flatten_mesh(line)
        return replace(self, shard=_ABSENT, replicate=Axis.of(line, 0), sharded_twice=None)

    def over_replicas(self) -> DataParallelMesh:
        """Return the same ranks, with every rank's piece sharded over the replicate axis too; makes no process group.

        Raises:
            ValueError: The mesh does not have both a replicate axis and a shard axis.
            NotImplementedError: ``dims`` names the axes.
        """
        if self.dims is not None:
            raise NotImplementedError(
                "fully_shard: shard_over_replicas is not supported with dp_mesh_dims; leave one of the two out"
            )
        if self.roles != ("replicate", "shard"):
            raise ValueError(
                f"fully_shard: shard_over_replicas needs a mesh with a replicate and a shard dimension; got dimensions "
                f"for {', '.join(self.roles)} in {self.mesh}. Pass a 2D mesh, such as init_device_mesh(device_type, "
                '(nodes, ranks_per_node), mesh_dim_names=("replicate", "shard")), or leave shard_over_replicas out'
            )
        if self.replicate.size == 1:
            return self
        return replace(self, sharded_twice=shard_first(self.mesh))

    @property
    def mesh_of_shards(self) -> DeviceMesh:
        """The mesh that shards lie on."""
        return self.mesh if self.sharded_twice is None else self.sharded_twice

    @cached_property  # each forward asks
    def has_portions(self) -> bool:
        """True with ``shard_over_replicas``: each rank's piece for the shard axis, its portion, is cut once more."""
        return self.sharded_twice is not None

    @property
    def parts(self) -> int:
        """The number of ranks that each portion is cut over; 1 if there are none."""
        return self.replicate.size if self.has_portions else 1

    @property
    def copies(self) -> int:
        """The number of ranks that keep the same shards."""
        return self.replicate.size // self.parts

    @property
    def gathers_from_others(self) -> bool:
        """True if a gather is a collective; False if this rank has all elements."""
        return self.shard.size > 1 or self.has_portions

    @property
    def is_pretended(self) -> bool:
        """True if other ranks are those of a fake process group: a gather brings other values than the shards have."""
        return any(axis.reaches_nobody and axis.size > 1 for axis in (self.shard, self.replicate))

    @property
    def first_axis(self) -> Axis:
        """The axis that gradients are reduced over first: the shard axis, or the replicate axis if there is none."""
        return self.replicate if self.shard.group is None else self.shard

    @property
    def roles(self) -> tuple[str, ...]:
        """The purpose of each dimension of ``mesh_of_shards``: "shard" or "replicate"."""
        if self.has_portions:
            return ("shard", "shard")
        if self.shard.group is None:
            return ("replicate",) * self.mesh.ndim
        return ("replicate", "shard") if self.mesh.ndim == 2 else ("shard",)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1D mesh that parameters are sharded over, which all-gather extensions receive."""
        if self.mesh.ndim == 1:
            return self.mesh
        assert self.mesh.mesh_dim_names is not None
        return self.mesh[self.mesh.mesh_dim_names[-1]]


_DATA = {"dp", "data"}
_REPLICATE = {"replicate", "replica", "replicas", "ddp"}
_SHARD = {"shard", "shards", "sharded", "fsdp", "efsdp"}
_OTHER = {
    *("cp", "context", "sp", "seq", "sequence", "ulysses", "ring"),
    *("tp", "tensor", "mp", "model", "pp", "pipe", "pipeline", "stage", "ep", "expert", "experts"),
}


def _warn_of_other_names(mesh: DeviceMesh) -> None:
    """Warn if the names of a 2D mesh contradict replicas in the first dimension and shards in the second."""
    names = mesh.mesh_dim_names
    if mesh.ndim != 2 or names is None:
        return
    first, second = ({*re.split(r"[^a-z]+", name.lower())} for name in names)
    own = [
        not first & _REPLICATE and bool(first & _SHARD or (first & _OTHER and not first & _DATA)),
        not second & _SHARD and bool(second & _REPLICATE or (second & _OTHER and not second & _DATA)),
    ]
    if not any(own):
        return
    one = names[0] if own[1] else names[1]
    warn(
        "fully_shard: parameters are replicated over the first dimension of a 2D mesh and sharded over the second; got "
        f"dimensions called {names}, expected names such as ('replicate', 'shard'). To shard over the ranks of both, "
        f"as with context parallelism, pass mesh._flatten('{'_'.join(names)}'); over {one!r} alone, pass "
        f"mesh[{one!r}]. If they are replicas and shards, rename them"
    )


def _submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[tuple(names)])


def _device_of(mesh: DeviceMesh) -> torch.device:
    try:
        return device_of(mesh.device_type)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"fully_shard: the mesh {mesh} is for {mesh.device_type}, which this process cannot use ({error}); pass a "
            "mesh of a device that it has, such as init_device_mesh('cpu', ...)"
        ) from error


_default_meshes: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """Return a 1D mesh over all ranks, the same object for each default process group.

    Initialize the default process group if there is none, as torch does.

    Raises:
        ValueError: There is none, and the environment does not say which ranks it should have.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ValueError(
                f"fully_shard: no mesh was passed, there is no process group, and torch cannot start one ({error}); "
                "start the program with torchrun --nproc-per-node N, or call init_process_group first"
            ) from error
    world = dist.group.WORLD
    if world not in _default_meshes:
        accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        _default_meshes[world] = init_device_mesh(accelerator.type, mesh_shape=(dist.get_world_size(),))
    return _default_meshes[world]


def shard_first(mesh: DeviceMesh) -> DeviceMesh:
    """Return ``mesh`` with its second dimension (shard) before its first one (replicate), in the same process groups.

    A DTensor that is sharded over two mesh dimensions is cut along the first of them first. The result is a mesh of its
    own, because torch refuses slices of a mesh in another order. It is the same object for each ``mesh``.
    """
    cache: dict[int, DeviceMesh] = mesh.__dict__.setdefault("_fsdp2_shard_first", {})
    if (known := cache.get(world := _present_world())) is not None:
        return known
    order = (1, 0, *range(2, mesh.ndim))
    names = mesh.mesh_dim_names
    assert names is not None  # torch demands them of a mesh of two dimensions
    with without_dispatch():
        cache[world] = DeviceMesh.from_group(
            [mesh.get_group(dim) for dim in order],
            mesh.device_type,
            mesh=mesh.mesh.permute(order).contiguous(),
            mesh_dim_names=tuple(names[dim] for dim in order),
        )
    return cache[world]


def regroup(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Return ``mesh`` reshaped to (rest, ``size``): subgroups of neighbours.

    Every rank of ``mesh`` must call this. Its process groups are made once per mesh and size, under each default
    process group. ``DeviceMesh`` does not make them, because it numbers process groups in the order in which all ranks
    of the job make them, and other ranks need not call this. A rank's place among its neighbours is its rank in their
    process group, which follows the order of ``mesh`` only if ``mesh`` preserves it.

    Pass the mesh that ``fully_shard`` was given, not that of a DTensor: on some ranks DTensor's caches may return
    another mesh, for which these ranks alone would make process groups.
    """
    cache: dict[tuple[int, int], DeviceMesh] = mesh.__dict__.setdefault("_fsdp2_regrouped", {})
    key = (_present_world(), size)
    if key not in cache:
        with without_dispatch():
            ranks = mesh.mesh.reshape(-1, size)
            rest, place = (ranks == dist.get_rank()).nonzero()[0].tolist()
            lines = [ranks[:, place].tolist(), ranks[rest].tolist()]
            own = [own_group(line if mesh_order(mesh) else sorted(line), "neighbours") for line in lines]
            cache[key] = DeviceMesh.from_group(own, mesh.device_type, mesh=ranks, mesh_dim_names=("dim_0", "dim_1"))
    return cache[key]


def regroup_within(whole: DeviceMesh, mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Return ``whole``, whose first dimensions are those of ``mesh``, with ``regroup(mesh, size)`` in their place.

    It makes no process groups of its own.
    """
    grouped = regroup(mesh, size)
    if whole.ndim == mesh.ndim:
        return grouped
    groups = [*grouped.get_all_groups(), *(whole.get_group(dim) for dim in range(mesh.ndim, whole.ndim))]
    names = tuple(f"dim_{i}" for i in range(len(groups)))
    with without_dispatch():
        ranks = whole.mesh.reshape(-1, size, *whole.mesh.shape[mesh.ndim :])
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)
