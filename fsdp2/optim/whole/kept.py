"""Whole parameters that stay with their owners from one step to the next, so that a step need not send them.

Who writes to a shard between steps, by loading a checkpoint or through ``.data``, writes nothing to the owner's whole
parameter. So every rank compares fingerprints of its shards, and a step sends the parameters that changed on any rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.optim.whole.fingerprint import fingerprint
from fsdp2.optim.whole.ownership import Owned, RankSet
from fsdp2.sharding.spec import on_this_rank

__all__ = ["KeptParams"]


@dataclass
class _Left:
    """A shard as a step has left it."""

    fingerprint: torch.Tensor
    dtype: torch.dtype

    def is_like(self, shard: torch.Tensor) -> bool:
        """Return whether ``shard`` can be compared with it."""
        return (shard.dtype, shard.device) == (self.dtype, self.fingerprint.device)


class KeptParams:
    """The whole parameters of ``ranks`` that this rank owns, as the last step has left them."""

    def __init__(self, ranks: RankSet) -> None:
        self._ranks = ranks
        self._sent = {param for param in ranks.params if ranks.is_sent(param)}  # others are at their owners anyway
        self._left: dict[Any, _Left] = {}
        self._wholes: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def wholes(self) -> Iterable[torch.Tensor]:
        """What is kept."""
        return self._wholes.values()

    def begin_step(self) -> tuple[list[int], torch.Tensor]:
        """Return two flags for each parameter: whether owners cannot have it, and whether its shard has changed since.

        The second ones are on the device.
        """
        missing, changed = [], []
        for param in self._ranks.params:
            shard, left = on_this_rank(param), self._left.get(param)
            known = left is not None and left.is_like(shard)
            missing.append(int(not known))
            same = left is None or not known or fingerprint(shard) == left.fingerprint
            changed.append(torch.as_tensor(same, device=self._ranks.device).logical_not().to(torch.int32))
        return missing, torch.stack(changed)

    def take(self, owned: Owned) -> torch.Tensor | None:
        """Return the whole parameter on its owner, and let go of it until ``keep``."""
        return self._wholes.pop(owned.key, None)

    def keep(self, owned: Owned, whole: torch.Tensor) -> None:
        """Keep ``whole``, whose values are on their way to the shards."""
        if owned.param in self._sent:
            self._wholes[owned.key] = whole

    def end_step(self, stepped: Collection[Any]) -> None:
        """Remember the shards of ``stepped``, which have the values of their whole parameters now."""
        for param in self._sent.intersection(stepped):
            shard = on_this_rank(param)
            self._left[param] = _Left(fingerprint(shard), shard.dtype)

    def drop(self) -> None:
        """Let go of everything, after a step that failed."""
        self._left.clear()
        self._wholes.clear()
