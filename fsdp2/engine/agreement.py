"""The ranks under one root agree on what they communicate, before a collective that not all of them start can hang.

A step that follows the last pass of its kind costs a comparison. Any other is decided through the store
(``comm/watch.py``): all ranks want it, or it belongs to a unit that the others take part in without using it
(``set_reduce_scatter_unused_params``), or every rank raises an error that says what each of them wants.
"""

from __future__ import annotations

import warnings
import zlib
from typing import TYPE_CHECKING, Any

from fsdp2.comm.watch import Wants, Watch, attend
from fsdp2.engine.journal import Journal, Step
from fsdp2.engine.lifecycle import Phase, Residency

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup
    from fsdp2.engine.root import RootContext

__all__ = ["Agreement"]

_END: Step = ("end", None, ())
_REMEDY = (
    "every rank must run the same units in the same order; give each rank some input for the unit, or call "
    "set_reduce_scatter_unused_params(True) on the root for units that some ranks skip"
)


class Agreement:
    """What the ranks that share a root's parameters do next, the same on all of them."""

    def __init__(self, watch: Watch, root: RootContext) -> None:
        self._watch = watch
        self._journal = Journal()
        self._root = root
        self._nested = 0
        self._taking_part = False
        self._took_part: dict[FSDPParamGroup, None] = {}
        watch.show(self._recent)

    @classmethod
    def open(cls, root: RootContext, error: RuntimeError | None) -> Agreement | None:
        """The agreement of the ranks under ``root``, once they have the same units; None where there is one process.

        Raises:
            RuntimeError: on every rank: parameters or options differ, or some rank comes with an ``error``.
        """
        process, groups = attend(), root.groups
        mesh = max((group.mesh.mesh for group in groups), key=lambda mesh: mesh.size(), default=None)
        if process is None or mesh is None or mesh.size() == 1:
            return None
        ranks = tuple(mesh.mesh.flatten().tolist())
        watch = Watch(process, ranks, _refusal)
        # What lies on a smaller mesh (experts) is another thing elsewhere, in number, shape and values.
        shared = [group for group in groups if set(group.mesh.mesh.mesh.flatten().tolist()) == set(ranks)]
        try:
            _compare(watch, shared, error)
        except RuntimeError:
            watch.close()  # the error may keep it alive, and others would hear of it
            raise
        return cls(watch, root)

    def _recent(self) -> tuple[int, list[Any]]:
        first, taken = self._journal.recent()
        return first, [self._want(kind, step) for kind, step in taken]

    # ---- passes ----

    def begin(self, kind: str, *, outermost: bool) -> None:
        """A pass starts; an ``outermost`` one ends whatever broke off before it, another is part of what runs."""
        self._watch.check()
        journal = self._journal
        if journal.kind and not outermost:
            self._nested += 1
            return
        if journal.kind:
            self.abandon()
        if not journal.follows(kind):
            self._watch.decide(journal.index, self._want(kind, ("begin", None, kind)), _choose)
        journal.begin(kind)

    def end(self) -> list[FSDPParamGroup]:
        """The pass is over; the groups that this rank only took part in since the last end."""
        if self._nested:
            self._nested -= 1
        elif self._journal.kind:
            self.about_to("end", None)
            self._journal.end()
        took_part = list(self._took_part)
        self._took_part.clear()
        return took_part

    @property
    def compares(self) -> bool:
        """Whether steps are compared now: between passes, and in a pass of one replica alone, they are not."""
        return bool(self._journal.kind)

    def take_part(self) -> None:
        """Do what the others are expected to do before this pass ends, as far as this rank can."""
        while self._journal.expected not in (None, _END) and self._take_part(self._journal.expected):
            pass

    def step_aside(self) -> None:
        """What comes now is none of the others' business; a pass that broke off before it is over."""
        if self._journal.kind:
            self.abandon()

    def abandon(self) -> None:
        """The pass broke off (recovery)."""
        self._journal.abandon()
        self._nested = 0
        self._took_part.clear()

    def forget_steps(self) -> None:
        """Let the steps of the next pass of each kind be decided, one by one, as those of the first were."""
        self._journal.forget_steps()

    # ---- steps ----

    def about_to(
        self, what: str, group: FSDPParamGroup | None, part: tuple[int, ...] = (), *, droppable: bool = False
    ) -> bool:
        """Whether to take the step now; a ``droppable`` one that others do not come to yet is left for later.

        Raises:
            RuntimeError: on every rank: they do not all come to this step, and cannot.
        """
        journal, step = self._journal, (what, group, part)
        if journal.follow(step) or not journal.kind:  # between passes nothing is compared
            return True
        while journal.expected != step:
            expected = journal.expected
            if expected is None:
                journal.decide(self._decide(step, droppable))
            elif self._take_part(expected):
                continue
            elif droppable and (not journal.on_track or journal.expects_later(step)):
                return False
            elif journal.on_track:
                journal.leave()
            else:
                got, want = (self._want(journal.kind, one) for one in (step, expected))
                self._watch.fail(_refusal({self._watch.ranks[0]: want, -1: got}))
        journal.took(step)
        return True

    def comes_later(self, what: str, group: FSDPParamGroup) -> bool:
        """Whether a droppable step would be left for later, as one that others come to after something else."""
        step, expected = (what, group, ()), self._journal.expected
        if expected is None or expected == step or (expected[1] is not None and expected[1].options.reduce_unused):
            return False
        return self._journal.expects_later(step)

    def _decide(self, step: Step, droppable: bool) -> Step:
        journal, groups = self._journal, self._root.groups
        want = self._want(journal.kind, step, droppable)
        chosen = self._watch.decide(journal.index, want, _choose)
        what, number, part = chosen["step"]
        return what, None if number is None else groups[number], tuple(part)

    def _want(self, kind: str, step: Step, droppable: bool = False) -> dict[str, Any]:
        """``step`` for the eyes of other ranks, as JSON values."""
        what, group, part = step
        if group is None:
            text = part if what == "begin" else f"the end of {kind}"
            return {"step": [what, None, part if what == "begin" else []], "text": text}
        number = self._root.groups.index(group)
        text = f"{what} {group.name or 'the root'!r} in {kind}"
        if what == "reduce":
            text = f"{text} ({', '.join(group.params[i].name for i in part[:3])}{', ...' if len(part) > 3 else ''})"
        elif group.rewritten:
            text = f"{text} anew ({group.rewritten}: its shard was written on this rank; write on all, or none)"
        elif part:
            text = f"{text} ({group.store.extensions.describe(part)})"
        # Where ranks wait for each other's units, a forward goes on with the first of them and a backward with the one
        # that was last in forward.
        order = number if not kind.startswith("backward") else -self._journal.places.get(group, number)
        optional = group.options.reduce_unused
        return {"step": [what, number, list(part)], "text": text} | {
            "droppable": droppable,
            "optional": optional,
            "order": order,
        }

    def _take_part(self, step: Step | None) -> bool:
        """Take a step that the others take with a unit this rank does not use; whether it could."""
        if step is None or self._taking_part:
            return False
        what, group, _ = step
        if group is None or not group.options.reduce_unused:
            return False
        self._taking_part = True
        try:
            if what == "gather":
                if group.lifecycle.residency in (Residency.GATHERING, Residency.UNSHARDED):
                    return False
                self._took_part[group] = None
                group.unshard()
            elif group.lifecycle.phase in (Phase.IDLE, Phase.REDUCED):
                group.post_backward()
            else:
                return False
        finally:
            self._taking_part = False
        return True


def _choose(wants: Wants) -> Any:
    """The one of the ranks' ``wants`` that all of them can do, or a text that says why there is none."""
    steps = [want["step"] for want in wants.values()]
    if all(step == steps[0] for step in steps):
        return wants[next(iter(wants))]
    optional = [want for want in wants.values() if want.get("optional")]
    return min(optional, key=lambda want: want["order"]) if optional else _refusal(wants)


def _refusal(wants: Wants) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, want in wants.items():
        by_text.setdefault(want["text"], []).append(rank)
    parts = [
        f"{'this rank' if ranks == [-1] else 'rank ' + ', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    ]
    return f"ranks do not do the same: {'; '.join(parts)}. Expected: {_REMEDY}"


# ---- the comparison at the start ----


def _compare(watch: Watch, groups: list[FSDPParamGroup], error: RuntimeError | None) -> None:
    plan = [line for group in groups for line in _describe(group)]
    values = [[group.params[0].name, group.initial[0]] for group in groups if group.initial[1] == group.store.stamp()]
    digest, seen = zlib.crc32(repr(plan).encode()), zlib.crc32(repr(values).encode())
    want = {"plan": digest, "values": seen, "error": None if error is None else str(error)}
    try:
        outcome = watch.decide(-3, want, _same)
        if not outcome["plan"]:
            watch.decide(-2, plan, _first_difference)
        if not outcome["values"]:
            text = watch.decide(-1, values, _other_values)
            if text and watch.ranks[0] == watch.rank:
                warnings.warn(text["text"], stacklevel=2)
    except RuntimeError:
        if error is not None:
            raise error from None
        raise


def _describe(group: FSDPParamGroup) -> list[list[str]]:
    options, mesh = group.options, group.mesh
    policy = options.mp_policy
    lines = [
        [
            f"the unit {group.name!r}" if group.name else "the root",
            f"on {mesh.replicate.size} x {mesh.shard.size} ranks with param_dtype={policy.param_dtype}, "
            f"reduce_dtype={policy.reduce_dtype}, reshard_after_forward={options.reshard_after_forward}",
        ]
    ]
    for param in group.params:
        layout = param.spec.layout
        trains = "" if param.requires_grad else ", frozen"
        lines.append([param.name, f"{tuple(layout.shape)} {param.dtype} cut along {layout.dim}{trains}"])
    return lines


def _same(wants: Wants) -> Any:
    errors = {rank: want["error"] for rank, want in wants.items() if want["error"] is not None}
    if errors:
        rank = min(errors)
        return f"rank {rank}: {errors[rank]}"
    return {key: len({want[key] for want in wants.values()}) == 1 for key in ("plan", "values")}


def _first_difference(wants: Wants) -> str:
    first = min(wants)
    for rank in sorted(wants):
        for ours, theirs in zip([*wants[first], ["nothing", "more"]], [*wants[rank], ["nothing", "more"]]):
            if ours != theirs:
                return (
                    f"ranks were given different models: rank {rank}: {theirs[0]} is {theirs[1]}, rank {first}: "
                    f"{ours[0]} is {ours[1]}. Expected: the same parameters, in the same order and with the same "
                    "options, on every rank; build the model alike everywhere"
                )
    return "ranks were given different models"


def _other_values(wants: Wants) -> Any:
    first = min(wants)
    for rank in sorted(wants):
        for ours, theirs in zip(wants[first], wants[rank]):
            if ours != theirs:
                text = (
                    f"{ours[0]}: rank {rank} started from other values than rank {first} ({theirs[1]} and {ours[1]} "
                    "lead them), so the shards are pieces of different initial values; use the same seed on every rank "
                    "before the model is built, or load weights after fully_shard"
                )
                return {"text": text}
    return None
