"""A checkpoint saved in the background on a process group that trains: collectives of two threads would pair."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fsdp2._torch.checkpoint import async_saves
from fsdp2.engine.passes import RootContext

__all__ = ["conflicting_save"]

_TEXT = (
    "torch.distributed.checkpoint.async_save is still saving on a process group that the model trains on, and its "
    "collectives could be matched with those of the step. Expected: a gloo group of its own, made once on all ranks "
    "(process_group=torch.distributed.new_group(backend='gloo')), or a call of its result() before the next step"
)


def conflicting_save(root: RootContext[Any]) -> str:
    """Why no pass may start under ``root`` while a thread saves a checkpoint; empty if one may."""
    for save in async_saves():
        if save.get("no_dist") or not save.get("use_collectives", True):
            continue
        axes = [axis for g in root.groups for axis in (g.mesh.shard, g.mesh.replicate, g.gradients.axis)]
        if (save.get("process_group") or dist.group.WORLD) in [axis.group for axis in axes]:
            return _TEXT
    return ""
