"""Gathers that the caller asks for: ``unshard()`` and ``use_weights``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.passes import Pass
from fsdp2.engine.root import RootContext
from fsdp2.engine.steps import PassKind, Take, take_unobserved
from fsdp2.engine.unit import FSDPState

__all__ = ["gather_by_hand"]


def gather_by_hand(used: Mapping[FSDPParamGroup, FSDPState], asked: str) -> None:
    """Start gathering groups, each of a unit, because the caller ``asked``, who may just have changed the shards.

    Between passes they are held from now on: the caller may change the shards again before waiting. Inside a pass this
    is a prefetch by hand, and the pass frees them.
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
            _gather_between_passes(root, groups, [used[group] for group in groups], PassKind(asked))
        else:
            _start(groups, running.take, in_backward=running.in_backward)


def _gather_between_passes(
    root: RootContext[FSDPState], groups: list[FSDPParamGroup], states: list[FSDPState], kind: PassKind
) -> None:
    """Show the observer a pass of these gathers, since ranks that did not ask would pair theirs with other steps."""
    alone = any(group.mesh.replicate.size > 1 for group in groups)  # one replica may ask, as it may evaluate
    for group in groups:
        if group.residency.is_outdated():
            group.reshard()
    if alone or not any(group.residency.needs_gather for group in groups):
        _start(groups, take_unobserved)
    else:
        observer = root.observer_by_hand(states, kind)
        observer.begin(kind, outermost=True)
        run = Pass(groups, observer)
        try:
            _start(groups, run.take)
            run.end()
        except BaseException:
            observer.abandon()
            raise
    for group in groups:
        group.residency.hold()


def _start(groups: list[FSDPParamGroup], take: Take, *, in_backward: bool = False) -> None:
    for group in groups:
        group.comm.lanes.gather_after_compute()  # the caller may have written the shards just now
        group.unshard(False, take, in_backward)
