"""Evaluations under hybrid sharding, which one replica may run while the others do something else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdp2.engine.order import ForwardOrder

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup

__all__ = ["Evaluation"]


class Evaluation:
    """One evaluation, or several in a row, without a trace in what follows.

    The replicas train in step: one that finds in memory what the others have to gather takes another step than they do,
    and so does one that remembers another order to prefetch in.
    """

    def __init__(self, groups: Iterable[FSDPParamGroup]) -> None:
        self.order: ForwardOrder[FSDPParamGroup] = ForwardOrder()
        self._found = {group for group in groups if not group.is_sharded and group.kept is not None}

    def keeps(self, group: FSDPParamGroup) -> bool:
        """Whether ``group`` must stay in memory after its forward, since it was there before."""
        return group in self._found

    def leave(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Free what was not in memory before."""
        for group in groups:
            if group not in self._found and not group.lifecycle.lent:
                group.reshard()
