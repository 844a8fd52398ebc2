"""Gathers by hand, which the caller asks for: ``unshard()``, ``use_weights`` and ``set_reshard_after_backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fsdp2.engine.collective import Launch, PassKind, launch_unobserved
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.observer import Observer
from fsdp2.engine.passes import Pass
from fsdp2.engine.root import RootContext, are_copied, with_outdated_portions
from fsdp2.engine.unit import FSDPState

__all__ = ["gather_before_backward", "gather_by_hand"]


def gather_by_hand(used: Mapping[FSDPParamGroup, FSDPState], asked: str) -> None:
    """Start gathering the groups in ``used``, each with its unit; ``asked`` names the call that asks for them.

    The caller has let the units ``reconcile``, before it listed their groups.

    Between passes, this is a separate pass, and the parameters are kept until the caller frees them or changes the
    shards. Inside a pass it is a prefetch, and that pass frees them.
    """
    by_root: dict[RootContext[FSDPState], list[FSDPParamGroup]] = {}
    # Before the first forward a unit has no root: the first such unit is the root of all of them.
    first = next((unit for unit in used.values() if unit.is_root is None), None)
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
            _gather_in_pass(groups, running)


def _gather_in_pass(groups: list[FSDPParamGroup], run: Pass) -> None:
    """Gather as a part of ``run``. A forward may have written to shards by now, and may do so before their use."""
    for group in groups:
        if not run.in_backward and not group.is_entered:  # a backward uses what its forward left
            _free_outdated(group, compared=run.is_compared)
    _start(groups, run.launch, in_backward=run.in_backward)
    if run.in_forward:
        for group in groups:
            group.residency.note_gathered()  # not loud: the caller has chosen this place, which quiet uses trust


def _free_outdated(group: FSDPParamGroup, *, compared: bool) -> None:
    """Free what was made of shards that have changed since, as ``FSDPParamGroup.pre_forward`` does."""
    if group.residency.is_outdated():
        group.reshard_outdated()
    else:
        group.residency.free_rewritten(compared=compared)


def _gather_between_passes(
    root: RootContext[FSDPState], groups: list[FSDPParamGroup], units: list[FSDPState], kind: PassKind
) -> None:
    """Gather in a separate pass, so that ranks on which nobody asked for it notice it, and keep the result."""
    alone = are_copied(groups)  # a single replica may gather, as it may evaluate
    for group in groups:
        group.residency.drop_passing_portions()
        _free_outdated(group, compared=root.compares(alone=alone))
    if not any(group.residency.needs_gather for group in groups):
        _start(groups, launch_unobserved)
    else:
        observer = root.observer_by_hand(units, kind, alone=alone)
        kind = kind.with_portions(root.numbers_of(with_outdated_portions(groups)))
        _run_pass(groups, observer, kind, _start)
    for group in groups:
        group.residency.end_portions(keep=False)
        group.residency.keep(by_hand=True)


def _run_pass(
    groups: list[FSDPParamGroup],
    observer: Observer,
    kind: PassKind,
    gather: Callable[[list[FSDPParamGroup], Launch], None],
) -> None:
    """Gather in a pass of its own."""
    run = Pass(groups, observer)
    run.begin(kind)
    try:
        gather(groups, run.launch)
        run.end()
    except BaseException:
        observer.abandon()
        raise


def _start(groups: list[FSDPParamGroup], launch: Launch, *, in_backward: bool = False) -> None:
    for group in groups:
        group.comm.lanes.gather_after_compute()  # the caller may have written the shards just now
        group.start_unshard(launch, in_backward=in_backward)


def gather_before_backward(units: Iterable[FSDPState], asked: str) -> None:
    """Show full parameters of ``units`` if several backwards are to come on forwards that ran, and none may free them.

    This gathers at once. A pipeline that splits backward in two (zero bubble) looks up the parameters to differentiate
    on the module, before autograd runs, so no hook could gather.
    """
    by_root: dict[RootContext[FSDPState], list[FSDPParamGroup]] = {}
    for unit in units:
        root = unit.root
        if not root.is_last_backward or root.finalizes_manually:
            by_root.setdefault(root, []).extend(group for group in unit.groups if root.pending.expects(group))
    for root, groups in by_root.items():
        if root.running is not None:
            _show(groups, root.running.launch)
        elif any(group.residency.needs_gather for group in groups):
            _run_pass(groups, root.observer, PassKind(asked), _show)
        else:
            _show(groups, launch_unobserved)
        for group in groups:
            group.residency.keep()


def _show(groups: list[FSDPParamGroup], launch: Launch) -> None:
    for group in groups:
        group.unshard_now(launch, in_backward=True)
