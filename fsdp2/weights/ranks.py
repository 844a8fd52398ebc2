"""Ranks that act together: the first shares values with the others, and an error on one is raised on all."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.comm.collectives import all_reduce, all_to_all_uneven, broadcast, exchange_objects, share_bytes
from fsdp2.sharding.mesh import Axis, listed_ranks, own_group
from fsdp2.sharding.platform import device_of

__all__ = ["Ranks"]

_KINDS = (FileNotFoundError, ImportError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Ranks:
    """A set of ranks that contains this one. The *first* is the one with the lowest global rank, ``first_rank``.

    A value is sent along the axes of ``lines``, one after the other. Each line is an axis and the rank in it that has
    the value by then. Without lines the set is this process alone. ``device`` is the device that tensors are sent from.
    """

    lines: tuple[tuple[Axis, int], ...]
    device: torch.device
    first_rank: int

    @classmethod
    def alone(cls, device: torch.device | None = None) -> Ranks:
        """Return the set of this process alone, which does not communicate; ``device`` defaults to the CPU."""
        return cls((), device or torch.device("cpu"), dist.get_rank() if dist.is_initialized() else 0)

    @classmethod
    def world(cls, device: torch.device | None = None) -> Ranks:
        """Return all ranks of the default process group; ``device`` defaults to one that its backend supports."""
        if not dist.is_initialized():
            return cls.alone(device)
        config = dist.get_backend_config()
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            on_cpu = accelerator is None or "cpu" in config or config in ("gloo", "mpi", "fake")
            device = torch.device("cpu") if on_cpu or accelerator is None else accelerator
        world = dist.group.WORLD
        assert world is not None
        return cls(((Axis.of_group(world, device.type), 0),), device, 0)

    @classmethod
    def of(cls, meshes: Iterable[DeviceMesh]) -> Ranks | None:
        """Return the ranks of the largest of ``meshes`` that contains this rank, or None if no mesh does.

        Raises:
            NotImplementedError: Another mesh has some of these ranks and others, so no mesh has all ranks of the model.
        """
        meshes = list(meshes)
        inside = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
        mesh = max(inside, key=lambda mesh: mesh.size(), default=None)
        if mesh is None:
            return None
        ranks = set(listed_ranks(mesh))
        for other in meshes:
            theirs = set(listed_ranks(other))
            if not ranks.isdisjoint(theirs) and not theirs <= ranks:
                raise NotImplementedError(
                    f"whole weights: got parameters on meshes of ranks {sorted(ranks)} and {sorted(theirs)}, expected "
                    "one mesh that has all of these ranks. Shard a parameter of the module, such as the root's, on a "
                    "mesh of all of them, or save and load with torch.distributed.checkpoint"
                )
        # The default process group is one line, and a mesh has one for each dimension; but it may not serve the device.
        if mesh.size() == dist.get_world_size() and mesh.device_type in dist.get_backend_config():
            return cls.world(device_of(mesh.device_type))
        return cls.along(mesh, range(mesh.ndim))

    @classmethod
    def along(cls, mesh: DeviceMesh, dims: Iterable[int]) -> Ranks:
        """Return this rank and the ranks whose coordinates in ``mesh`` differ from its own only in ``dims``."""
        here, dims = mesh.get_coordinate(), [dim for dim in dims if mesh.size(dim) > 1]
        assert here is not None
        first = int(mesh.mesh[tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))].min())
        start = (mesh.mesh == first).nonzero()[0].tolist()
        lines = []
        for dim in dims:
            axis = Axis.of(mesh, dim)
            assert axis.group is not None
            source = int(mesh.mesh[tuple(start[dim] if d == dim else at for d, at in enumerate(here))])
            lines.append((axis, dist.get_group_rank(axis.group, source)))
        return cls(tuple(lines), device_of(mesh.device_type), first)

    def on_one_axis(self) -> Ranks:
        """Return the same ranks on one axis, in ascending order; they make a process group if they have several.

        All of the ranks must call it.
        """
        if len(self.lines) < 2:
            return self
        everyone = sorted(self.gather(dist.get_rank()))
        axis = Axis.of_group(own_group(everyone, "weights"), self.device.type)
        return replace(self, lines=((axis, everyone.index(self.first_rank)),))

    @property
    def first(self) -> bool:
        """True on the first rank: the one that sends values to the others, and "rank 0" of ``rank0_only``."""
        return not self.lines or dist.get_rank() == self.first_rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis, _ in self.lines)

    def share(self, value: Any) -> Any:
        """Return the first rank's ``value`` on every rank; tensors in it arrive on the CPU.

        ``pickle`` alone would bring those of a GPU to that of the first rank, and has none of some dtypes.

        Raises:
            Exception: The first rank cannot pickle it, or another cannot unpickle it. Every rank raises the error.
        """
        if not self.lines:
            return value
        file = io.BytesIO()
        with self.agreed():
            if self.first:
                torch.save(value, file)
        data = file.getvalue()
        for axis, source in self.lines:
            data = share_bytes(data, axis, source, self.device)
        with self.agreed():
            if data and not self.first:  # a simulated rank gets nothing
                value = torch.load(io.BytesIO(data), "cpu", weights_only=False)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return a list of all ranks' values, on every rank."""
        values = [value]
        for axis, _ in self.lines:
            values = [one for some in exchange_objects(values, axis, self.device) for one in some]
        return values

    def to_first(self, mine: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the bytes ``mine`` of every rank on the first one, in the order of the axis; nothing on the others.

        ``sizes`` are the numbers of bytes that ranks send. The ranks have one axis at most.
        """
        if self.size == 1:
            return mine
        ((axis, source),) = self.lines
        received = torch.empty(sum(sizes) if self.first else 0, dtype=torch.uint8, device=self.device)
        sent = [mine.numel() if rank == source else 0 for rank in range(axis.size)]
        all_to_all_uneven(received, mine, list(sizes) if self.first else [0] * axis.size, sent, axis, async_op=False)
        return received

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Overwrite ``buffer`` with the first rank's."""
        for axis, source in self.lines:
            broadcast(buffer, axis, source)

    def sum(self, buffer: torch.Tensor) -> None:
        """Overwrite ``buffer`` with the sum of all ranks' buffers."""
        for axis, _ in self.lines:
            all_reduce(buffer, axis, average=False, async_op=False)

    @contextlib.contextmanager
    def agreed(self, explain: Callable[[Exception], Exception] = lambda problem: problem) -> Iterator[None]:
        """Run a block on every rank. If it raises on one rank, every rank raises what ``explain`` makes of the error.

        The block must not communicate, except for one collective at its end: a rank that raised earlier would leave the
        others waiting.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = explain(error)
        self.agree(problem)

    def agree(self, problem: Exception | None) -> None:
        """Raise an error on every rank if any rank has a problem; the error names the ranks with problems.

        Raises:
            Exception: Its type is that of the lowest failing rank's error, or RuntimeError if others may lack it.
        """
        if not self.lines:
            if problem is not None:
                raise problem
            return
        problems = torch.tensor([int(problem is not None)], device=self.device)
        self.sum(problems)
        if not int(problems):
            return
        found = self.gather((dist.get_rank(), None if problem is None else _described(problem)))
        failed = {rank: what for rank, what in sorted(found, key=lambda entry: entry[0]) if what is not None}
        name, text = next(iter(failed.values()))
        if len(failed) < self.size or len(set(failed.values())) > 1:
            text = "\n".join(f"on rank {rank}: {what}" for rank, (_, what) in failed.items())
        raise next(kind for kind in _KINDS if kind.__name__ == name)(text) from problem


def _described(problem: Exception) -> tuple[str, str]:
    """Return the name of an error type that every rank can raise, and the text."""
    kind = next((kind for kind in type(problem).__mro__ if kind in _KINDS), None)
    if kind is None:
        return "RuntimeError", f"{type(problem).__name__}: {problem}"
    return kind.__name__, str(problem)
