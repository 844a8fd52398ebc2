"""The ranks a module is spread over: what one of them knows, all of them learn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.comm.collectives import all_reduce, broadcast, exchange_objects, share_object
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
    """The ranks along ``axes``, one axis after the other; no axis is this process alone.

    ``device`` is where tensors must be to travel, ``first_rank`` the global rank of the first of them all.
    """

    axes: tuple[Axis, ...]
    device: torch.device
    first_rank: int = 0

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        """This process, which communicates with nobody."""
        return cls((), device, dist.get_rank() if dist.is_initialized() else 0)

    @classmethod
    def world(cls, device: torch.device | None = None) -> Ranks:
        """Every rank of the default process group; ``device`` is one its backend serves (None: ask it)."""
        if not dist.is_initialized():
            return cls.alone(device or torch.device("cpu"))
        config = dist.get_backend_config()
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            on_cpu = accelerator is None or "cpu" in config or config in ("gloo", "mpi", "fake")
            device = torch.device("cpu") if on_cpu or accelerator is None else accelerator
        axis = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), dist.get_backend())
        return cls((axis,), device)

    @classmethod
    def of(cls, meshes: Iterable[DeviceMesh]) -> Ranks | None:
        """The ranks of the largest of ``meshes``; None without any."""
        mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        if mesh is None:
            return None
        device = device_of(mesh.device_type)
        if mesh.size() == dist.get_world_size():
            return cls.world(device)
        axes = tuple(Axis.of(mesh, dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)
        return cls(axes, device, int(mesh.mesh.flatten()[0]))

    @property
    def first(self) -> bool:
        """Whether this is the first of them: the one that others take values from."""
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def size(self) -> int:
        """How many they are."""
        size = 1
        for axis in self.axes:
            size *= axis.size
        return size

    def share(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank."""
        for axis in self.axes:
            value = share_object(value, axis, self.device)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        values = [value]
        for axis in self.axes:
            values = [one for some in exchange_objects(values, axis) for one in some]
        return values

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` be the first rank's."""
        for axis in self.axes:
            broadcast(buffer, axis)

    def sum(self, buffer: torch.Tensor) -> None:
        """Make ``buffer`` be the sum of all ranks'."""
        for axis in self.axes:
            all_reduce(buffer, axis, average=False, async_op=False)

    def agree(self, problem: Exception | None) -> None:
        """Return when no rank has a problem; else raise on every rank, naming the ranks that have one.

        Raises:
            Exception: of the kind of the first rank's problem that has one, if that is one of Python's own.
        """
        if not self.axes:
            if problem is not None:
                raise problem
            return
        found = self.gather((dist.get_rank(), None if problem is None else _described(problem)))
        failed = {rank: what for rank, what in sorted(found, key=lambda entry: entry[0]) if what is not None}
        if not failed:
            return
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
