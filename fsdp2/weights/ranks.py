"""Ranks that act together: which is the first, what it has for the others, and whether all of them can go on."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.comm.collectives import all_reduce, broadcast, exchange_objects, share_bytes
from fsdp2.sharding.mesh import Axis

__all__ = ["Ranks", "device_of"]

_KINDS = (FileNotFoundError, ImportError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


def device_of(kind: str) -> torch.device:
    """This process's device of a kind such as "cuda"."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


@dataclass(frozen=True)
class Ranks:
    """Some ranks, this one among them. The *first* is the one with the lowest global rank, ``first_rank``.

    ``lines`` are the axes that a value travels along, one after the other, each with the rank in it that has the value
    by then; no line is this process alone. ``device`` is where tensors must be to travel.
    """

    lines: tuple[tuple[Axis, int], ...]
    device: torch.device
    first_rank: int

    @classmethod
    def alone(cls, device: torch.device | None = None) -> Ranks:
        """This process, which communicates with nobody; ``device`` is by default the CPU."""
        return cls((), device or torch.device("cpu"), dist.get_rank() if dist.is_initialized() else 0)

    @classmethod
    def world(cls, device: torch.device | None = None) -> Ranks:
        """Every rank of the default process group; ``device`` is one its backend serves (default: found out)."""
        if not dist.is_initialized():
            return cls.alone(device)
        config = dist.get_backend_config()
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            on_cpu = accelerator is None or "cpu" in config or config in ("gloo", "mpi", "fake")
            device = torch.device("cpu") if on_cpu or accelerator is None else accelerator
        axis = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), dist.get_backend())
        return cls(((axis, 0),), device, 0)

    @classmethod
    def of(cls, meshes: Iterable[DeviceMesh]) -> Ranks | None:
        """The ranks of the largest of ``meshes`` that this rank is in; None without any."""
        inside = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
        mesh = max(inside, key=lambda mesh: mesh.size(), default=None)
        if mesh is None:
            return None
        if mesh.size() == dist.get_world_size():
            return cls.world(device_of(mesh.device_type))
        return cls.along(mesh, range(mesh.ndim))

    @classmethod
    def along(cls, mesh: DeviceMesh, dims: Iterable[int]) -> Ranks:
        """This rank and those that differ from it in the dimensions ``dims`` of ``mesh`` alone."""
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

    @property
    def first(self) -> bool:
        """Whether this is the first of them: the one that others take values from, and "rank 0" of ``rank0_only``."""
        return not self.lines or dist.get_rank() == self.first_rank

    @property
    def size(self) -> int:
        """How many they are."""
        return math.prod(axis.size for axis, _ in self.lines)

    def share(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank.

        Raises:
            Exception: it cannot be pickled there or unpickled here; on every rank.
        """
        if not self.lines:
            return value
        with self.agreed():
            data = pickle.dumps(value) if self.first else b""
        for axis, source in self.lines:
            data = share_bytes(data, axis, source, self.device)
        with self.agreed():
            received = pickle.loads(data) if data and not self.first else value
        return received

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        values = [value]
        for axis, _ in self.lines:
            values = [one for some in exchange_objects(values, axis, self.device) for one in some]
        return values

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` be the first rank's."""
        for axis, source in self.lines:
            broadcast(buffer, axis, source)

    def sum(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` be the sum of all ranks'."""
        for axis, _ in self.lines:
            all_reduce(buffer, axis, average=False, async_op=False)

    @contextlib.contextmanager
    def agreed(self, explain: Callable[[Exception], Exception] = lambda problem: problem) -> Iterator[None]:
        """A block that every rank runs: if it raises on one, it raises on all, as ``explain`` puts it.

        What it does must not communicate, but for a collective at its end.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = explain(error)
        self.agree(problem)

    def agree(self, problem: Exception | None) -> None:
        """Return when no rank has a problem; else raise on every rank, naming the ranks that have one.

        Raises:
            Exception: of the kind of the first rank's problem that has one, if that is one of Python's own.
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
    """The name of a kind of error that every rank can raise, and the text."""
    kind = next((kind for kind in type(problem).__mro__ if kind in _KINDS), None)
    if kind is None:
        return "RuntimeError", f"{type(problem).__name__}: {problem}"
    return kind.__name__, str(problem)
