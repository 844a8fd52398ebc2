"""Gathers that the caller asks for: ``unshard()`` and ``use_weights``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.observer import Admit, Step
from fsdp2.engine.passes import RootContext
from fsdp2.engine.unit import FSDPState

__all__ = ["gather_by_hand"]


def gather_by_hand(used: Mapping[FSDPParamGroup, FSDPState], asked: str) -> None:
    """Start gathering groups, each of a unit, because the caller ``asked``, who may just have changed the shards.

    They are kept from now on: the caller may change the shards again before waiting.
    """
    by_root: dict[RootContext[FSDPState], list[FSDPParamGroup]] = {}
    first = next(iter(used.values()), None)
    for group, state in used.items():
        if state.is_root is None:  # no forward has run: the first of these units stands for the root
            group.lazy_init(in_root=group.in_root)
        root = (first if first is not None and first.is_root is None else state).root
        by_root.setdefault(root, []).append(group)
    for root, groups in by_root.items():
        running = root.running
        if running is None:
            _gather_between_passes(root, groups, [used[group] for group in groups], asked)
        else:
            _start(groups, running.admit, in_backward=running.is_backward)


def _gather_between_passes(
    root: RootContext[FSDPState], groups: list[FSDPParamGroup], states: list[FSDPState], asked: str
) -> None:
    """Show the observer a pass of these gathers, since ranks that did not ask would pair theirs with other steps."""
    alone = any(group.mesh.replicate.size > 1 for group in groups)  # one replica may ask, as it may evaluate
    for group in groups:
        group.drop_evaluated()
        group.drop_stale(unseen=alone and root.observer is not None)
    first = next((Step("gather", group) for group in groups if group.lifecycle.changes("start_gather")), None)
    observer = None if alone or first is None else root.observer_by_hand(states, asked)
    if observer is None:
        _start(groups, None)
        return
    observer.begin(asked, outermost=True, first=first)
    try:
        _start(groups, observer.before)
        observer.end()
    except BaseException:
        observer.abandon()
        raise


def _start(groups: list[FSDPParamGroup], admit: Admit | None, *, in_backward: bool = False) -> None:
    for group in groups:
        lanes = group.comm.lanes
        lanes.gather_after_compute()
        group.unshard(False, admit, in_backward)
        group.note_kept()
