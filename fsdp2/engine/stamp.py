"""Stamps: whether a group's shards are still those that something was made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2._torch.tensors import local_tensors, versions_of
from fsdp2.engine.param import FSDPParam, is_managed_tensor, lie_in
from fsdp2.engine.registry import Registry

__all__ = ["Stamp", "note_optimizer_step"]

_alive: Registry[Stamp] = Registry()


class Stamp:
    """The shards of one group at the moment when something was made of them that may be used later.

    That is a gather ahead of its use, full parameters or pieces that outlive their pass, or portions. Whoever finds the
    shards ``changed`` gathers anew. That starts a collective, so it must follow from facts that all ranks see alike:
    steps of optimizers that hold one of the parameters, version counters of the DTensors, which every rank increments
    (also one whose shard is empty), and parameters that were replaced. A write through ``to_local()`` shows in a
    version counter of the local tensor, on every rank that has elements to write to. If one rank alone writes so, it
    alone gathers, and the observer makes all ranks raise.

    What no counter shows is a write through ``.data``, by ``torch._foreach_*``, or to the local tensor of a detached
    DTensor (those of ``state_dict()`` excepted).
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params = params
        self._pieces = local_tensors([param.sharded for param in params])
        self._versions = self._current_versions()
        self._stepped = False
        _alive.add(self)

    def _current_versions(self) -> list[int]:
        return versions_of([*[param.sharded for param in self._params], *self._pieces])

    def note_step(self, stepped: set[int]) -> None:
        """Note that an optimizer has stepped that holds the tensors with the ids ``stepped``."""
        self._stepped = self._stepped or any(id(param.sharded) in stepped for param in self._params)

    @property
    def changed(self) -> bool:
        """Return whether the shards were written, or others are in their place."""
        if self._stepped or self._versions != self._current_versions():
            return True
        return not lie_in(self._params, self._pieces)


def note_optimizer_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Tell the stamps of the shards that ``optimizer`` holds that it has stepped; version counters need not show that.

    DTensor's operators that change several tensors at once (``foreach``) run below autograd, where no counter grows.
    """
    if not len(_alive):
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if is_managed_tensor(param)}
    if stepped:
        for stamp in _alive:
            stamp.note_step(stepped)
