"""Lending parameters of a group: for a while somebody else decides what the modules show of them.

Meanwhile the group neither gathers nor frees, its state dict hooks stand aside, and its memory stays as it is: what was
kept after a forward is still there afterwards, and graphs recorded before can be gone back through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.lifecycle import Residency
from fsdp2.engine.param import FSDPParam, show

__all__ = ["lend", "take_back"]


def lend(group: FSDPParamGroup, params: Collection[FSDPParam]) -> None:
    """Leave it to the caller what the modules show of ``params`` until ``take_back``.

    Now they show the shards of the whole group; a gather in flight is waited for.
    """
    group.wait_for_unshard()
    group.settle_writes()
    if not group.lifecycle.lent:
        group.show("sharded")
    group.lifecycle.lent.update(params)


def take_back(group: FSDPParamGroup, params: Collection[FSDPParam], values: Mapping[FSDPParam, torch.Tensor]) -> None:
    """Show ``params`` as before; ``values``, new full ones, go to the shards and to whatever is kept in memory.

    Full parameters that were fresh, or stale because of an optimizer step since, stay so.
    """
    residency, extensions = group.lifecycle.residency, group.store.extensions.params
    kept = group.kept
    fresh = kept is not None and not kept.outdated and not kept.written_here()
    try:
        for param, value in values.items():
            param.write(value, full=residency is Residency.UNSHARDED and param not in extensions)
        if group.subgroup is not None:
            group.subgroup.write(values)
        if kept is not None and fresh:
            group.note_kept(by_evaluation=kept.by_evaluation)
    finally:
        group.lifecycle.lent.difference_update(params)
        if show(list(params), "sharded"):
            group.gradients.forget_plan()
        group.show_resident()
    if not extensions.isdisjoint(values):  # only a gather makes their full parameters
        group.reshard()
