"""Stamps: whether a group's shards have changed since something was made of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from fsdp2._torch.tensors import local_tensors, versions_of
from fsdp2.engine.param import FSDPParam, have_locals

__all__ = ["Stamp", "note_optimizer_step"]

_count = 0  # of steps of optimizers
_steps: deque[tuple[int, weakref.ref[torch.optim.Optimizer]]] = deque(maxlen=256)
"""The numbers of the latest steps, and their optimizers. A stamp that is older than all of them counts as changed."""


class Stamp:
    """The shards of one group when something was made of them that may be used later.

    This may be a gather ahead of its use, full parameters or pieces that outlive their pass, or portions. If the shards
    have ``changed``, they are gathered again. That starts a collective, so the answer must be the same on all ranks. It
    follows from steps of optimizers that hold one of the parameters, from the version counters of the DTensors, which
    every rank increments even if its shard is empty, and from replaced parameters. A write through ``to_local()``
    increments the version counter of the local tensor, on every rank that has elements to write to. If one rank alone
    writes in this way, it alone gathers, and the observer makes all ranks raise.

    No counter shows a write through ``.data``, by ``torch._foreach_*``, or to the local tensor of a detached DTensor
    (except for the DTensors of ``state_dict()``).
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params = params
        self._locals = local_tensors([param.sharded for param in params])
        self._versions = self._current_versions()
        self._seen_step = _count  # the number of the last step that is known not to concern these shards

    def _current_versions(self) -> list[int]:
        return versions_of([*[param.sharded for param in self._params], *self._locals])

    def _was_stepped(self) -> bool:
        """Return whether an optimizer that holds one of the shards has stepped since."""
        if self._seen_step == _count:
            return False
        later = [optimizer() for number, optimizer in _steps if number > self._seen_step]
        if len(later) < _count - self._seen_step or None in later:
            return True  # some steps are forgotten, or their optimizer was freed: it may have held a shard
        mine = {id(param.sharded) for param in self._params}
        groups = [group for optimizer in later if optimizer is not None for group in optimizer.param_groups]
        if any(id(param) in mine for group in groups for param in group["params"]):
            return True
        self._seen_step = _count  # none of these steps has to be looked at again
        return False

    @property
    def changed(self) -> bool:
        """True if the shards were written or replaced."""
        if self._was_stepped() or self._versions != self._current_versions():
            return True
        return not have_locals([param.sharded for param in self._params], self._locals)


def note_optimizer_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Note that ``optimizer`` has stepped, since version counters need not show that.

    DTensor's operators that change several tensors at once (``foreach``) run below autograd, where no counter grows.
    """
    global _count
    _count += 1
    _steps.append((_count, weakref.ref(optimizer)))
