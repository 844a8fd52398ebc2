"""Gathers by hand, which the caller asks for: ``unshard()`` and ``use_weights``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.engine.collective import Launch, PassKind, launch_unobserved
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.passes import Pass
from fsdp2.engine.root import RootContext, are_copied, with_outdated_portions
from fsdp2.engine.unit import FSDPState

__all__ = ["gather_by_hand"]


def gather_by_hand(used: Mapping[FSDPParamGroup, FSDPState], asked: str) -> None:
    """Start gathering the groups in ``used``, each with its unit; ``asked`` names the call that asks for them.

    Between passes, this is a separate pass, and the parameters are kept until the caller frees them or changes the
    shards. Inside a pass it is a prefetch, and that pass frees them.
    """
    by_root: dict[RootContext[FSDPState], list[FSDPParamGroup]] = {}
    # Before the first forward a unit has no root: the first such unit is the root of all of them.
    first = next((unit for unit in used.values() if unit.is_root is None), None)
    for unit in dict.fromkeys(used.values()):
        unit.reconcile()
    for group, unit in used.items():
        group.lazy_init()
        if unit.is_root is None and first is not None:
            unit = first
        by_root.setdefault(unit.root, []).append(group)
    for root, groups in by_root.items():
        running = root.running
        if running is None:
            _gather_between_passes(root, groups, [used[group] for group in groups], PassKind(asked))
        else:
            _start(groups, running.launch, in_backward=running.in_backward)


def _gather_between_passes(
    root: RootContext[FSDPState], groups: list[FSDPParamGroup], units: list[FSDPState], kind: PassKind
) -> None:
    """Gather in a separate pass, so that ranks on which nobody asked for it notice it, and keep the result."""
    one_replica = are_copied(groups)  # a single replica may gather, as it may evaluate, so ranks are not compared
    for group in groups:
        group.residency.drop_passing_portions()
        if group.residency.is_outdated():
            group.reshard()
        else:
            group.residency.free_rewritten(compared=not one_replica)
    if one_replica or not any(group.residency.needs_gather for group in groups):
        _start(groups, launch_unobserved)
    else:
        observer = root.observer_by_hand(units, kind)
        kind = kind.with_portions(root.numbers_of(with_outdated_portions(groups)))
        run = Pass(groups, observer)
        run.begin(kind)
        try:
            _start(groups, run.launch)
            run.end()
        except BaseException:
            observer.abandon()
            raise
    for group in groups:
        group.residency.end_portions(keep=False)
        group.residency.keep(by_hand=True)


def _start(groups: list[FSDPParamGroup], launch: Launch, *, in_backward: bool = False) -> None:
    for group in groups:
        group.comm.lanes.gather_after_compute()  # the caller may have written the shards just now
        group.start_unshard(launch, in_backward=in_backward)
