"""Stamps: whether a group's shards have changed since something was made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2._torch.hooks import outside_dynamo
from fsdp2._torch.tensors import local_tensors, versions_of
from fsdp2.comm.sample import Sample
from fsdp2.engine.param import FSDPParam, have_locals, is_managed_tensor

__all__ = ["UNSEEN", "Stamp", "note_optimizer_step"]

UNSEEN = "in a way that no version counter shows (.data, torch._foreach_*, the local tensor of a detached parameter)"
"""What errors say of writes that a stamp does not notice."""

_count = 0  # of steps of optimizers
_STEPPED = "_fsdp2_stepped"
"""An attribute of shards: the number of the last step of an optimizer that holds them."""


class Stamp:
    """The shards of one group when something was made of them that may be used later.

    This may be a gather ahead of its use, full parameters or pieces that outlive their pass, or portions. If the shards
    have ``changed``, they are gathered again. That starts a collective, so the answer must be the same on all ranks. It
    follows from steps of optimizers that hold one of the parameters, from the version counters of the DTensors, which
    every rank increments even if its shard is empty, and from replaced parameters. A write through ``to_local()``
    increments the version counter of the local tensor, on every rank that has elements to write to. If one rank alone
    writes in this way, it alone gathers, and the observer makes all ranks raise.

    No counter shows a write through ``.data``, by ``torch._foreach_*``, or to the local tensor of a detached DTensor
    (except for the DTensors of ``state_dict()``). With a ``sample`` of the shards, ``unlike`` finds many of these by
    values, which ranks may see differently.
    """

    def __init__(self, params: Sequence[FSDPParam], sample: Sample[FSDPParam] | None = None) -> None:
        self._params = params
        self._sample = sample
        self._sampled = None if sample is None else sample.take()
        self._locals = local_tensors([param.sharded for param in params])
        self._versions = self._current_versions()
        self._seen_step = _count  # the number of the last step that is known not to concern these shards

    def _current_versions(self) -> list[int]:
        return versions_of([*[param.sharded for param in self._params], *self._locals])

    def _was_stepped(self) -> bool:
        """Return whether an optimizer that holds one of the shards has stepped since."""
        if self._seen_step == _count:
            return False
        if any([getattr(param.sharded, _STEPPED, 0) > self._seen_step for param in self._params]):
            return True
        self._seen_step = _count  # none of these steps has to be looked at again
        return False

    @property
    def changed(self) -> bool:
        """True if the shards were written or replaced."""
        if self._was_stepped() or self._versions != self._current_versions():
            return True
        return not have_locals([param.sharded for param in self._params], self._locals)

    def unlike(self) -> list[FSDPParam]:
        """Return the parameters whose shards have other values than they had, as far as the sample shows.

        Ask this only if they have not ``changed``: then they are where they were sampled.
        """
        return [] if self._sample is None or self._sampled is None else self._sample.unlike(self._sampled)


@outside_dynamo
def note_optimizer_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Note on the shards that ``optimizer`` holds that it has stepped, since version counters need not show that.

    DTensor's operators that change several tensors at once (``foreach``) run below autograd, where no counter grows. It
    is noted now, not looked up later: when an optimizer that was dropped is freed differs between ranks.
    """
    global _count
    _count += 1
    for group in optimizer.param_groups:
        for param in group["params"]:
            if is_managed_tensor(param):
                setattr(param, _STEPPED, _count)
