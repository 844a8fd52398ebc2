"""The ranks under one root agree on what they communicate, before a collective that not all of them start can hang.

A pass like a known one costs a comparison per step and no word. A rank that is about to leave the known way meets the
others first; so either all ranks do what they know of each other, or the one that does not asks before its collective
starts. From the second step of this kind on a pass is *open*: it goes on without asking, and its steps are compared
when it ends, before anybody uses the gradients. Where the host waits for collectives and open passes part, the wait
itself finds out (``ranks/board.py``).

Units with ``set_reduce_scatter_unused_params`` are the exception: other ranks take part in them without using them, so
where they are, each step off the known way is chosen by all ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.root import RootContext
from fsdp2.engine.steps import END, Answer, CanJoin, Member, PassKind, Step
from fsdp2.ranks.board import Board
from fsdp2.ranks.start import Line, options_of
from fsdp2.ranks.steps import StepLog

__all__ = ["RankMonitor"]

_DEVIATIONS = 1  # that a pass asks about before it is open
_REMEDY = "every rank must run the same units in the same order, after the same calls of setters and of unshard()"
_FORWARDS = ("forward", "evaluation")
_Job = Callable[[], None]


class RankMonitor:
    """The observer of one root on one rank, and what other ranks see of it.

    ``run`` runs what waits for other ranks: at once, or in the background where the host must not wait. ``conflict``
    says why no pass may start now, if so.
    """

    def __init__(
        self,
        board: Board,
        root: RootContext,
        run: Callable[[_Job], None],
        conflict: Callable[[RootContext], str] = lambda root: "",
    ) -> None:
        self.board = board
        self.log = StepLog()
        self._root = root
        self._run = run
        self._conflict = conflict
        self._nested = 0
        self._to_begin: PassKind | None = None  # a pass that has taken no step so far
        self._setters: dict[str, None] = {}  # that changed options since the ranks compared these
        self._places: dict[Any, int] = {}  # of the groups in the last forward
        self._needed_in_backward: set[Any] = set()  # groups that some backward gathered, though ranks may skip them
        if not self._electing:
            self.log.first_kind = PassKind("forward")

    @property
    def _electing(self) -> bool:
        """Whether ranks may skip units that others use, so that they have to choose."""
        return any(group.options.reduce_unused for group in self._root.groups)

    # ---- passes ----

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """A pass starts. Its first step begins it: one without steps concerns no other rank."""
        self.board.check()
        log = self.log
        if conflict := self._conflict(self._root):
            self.board.fail(f"rank {self.board.rank}: {conflict}", log.epoch)
        if (log.kind or self._to_begin) and not outermost:
            self._nested += 1
            return
        if log.kind:
            self.abandon()
        self._to_begin = kind
        if self._electing:  # others may take a step in it that this rank has to join
            self._begin(kind, None)

    def _begin(self, kind: PassKind, first: Step | None) -> None:
        """A pass takes its ``first`` step, if that is known; where the ranks do not all expect the pass, they meet."""
        log, self._to_begin = self.log, None
        known = log.follows(kind) and not self._setters
        log.begin(kind, self._guess(kind))
        if self._electing and not all(map(log.has_gather, self._without_place(kind))):
            log.forget_way()
        if not known:
            self._meet(first, begins=True)
            self._setters.clear()

    def _without_place(self, kind: PassKind) -> list[FSDPParamGroup]:
        """Return the groups that any rank may gather in a pass of ``kind``, unless a known pass gathers them.

        These are groups that some ranks may skip: in a forward all of them, in a backward those that a forward before
        it gathered, if they train or were gathered in a backward before. As long as no rank has used one of them its
        place is not known, and a rank may come to it before any step.
        """
        found = []
        for number, group in enumerate(self._root.groups):
            options, residency = group.options, group.residency
            if not options.reduce_unused or group.mesh.shard.size == 1 or not residency.needs_gather:
                continue
            if kind.name not in _FORWARDS:
                trains = any(param.requires_grad for param in group.params)
                needed = options.unshard_in_backward and (trains or group in self._needed_in_backward)
                if number not in kind.used or not needed:
                    continue
            found.append(group)
        return found

    def _guess(self, kind: PassKind) -> list[Step] | None:
        """What the first pass of a kind probably does: it gathers one group after the other in the model's order."""
        if kind.name not in _FORWARDS or self.log.knows(kind) or self._electing:
            return None
        groups = [group for group in self._root.groups if group.mesh.shard.size > 1]
        return [*(Step("gather", group, group.store.formats_digest) for group in groups), END]

    def end(self) -> None:
        """The pass is over; if it was open, the ranks compare it."""
        log = self.log
        if self._nested:
            self._nested -= 1
        elif log.kind:
            if log.open and not self._electing:
                self._meet()
            if log.kind.name == "forward":
                self._places = {step.group: i for i, step in enumerate(log.steps)}
            else:
                gathered = [step.group for step in log.steps if step.kind == "gather" and step.group is not None]
                self._needed_in_backward.update(group for group in gathered if group.options.reduce_unused)
            log.end()

    def joins_before_end(self, can_join: CanJoin) -> Step | None:
        """The next step that the others are expected to take before this pass ends, if this rank can join it."""
        expected = self.log.expected
        if expected is None or expected == END or not can_join(expected, self.log.decided is None):
            return None
        return expected

    def suspend(self) -> None:
        """What comes now is not compared; a pass that was aborted before it is over."""
        self.abandon()

    def abandon(self) -> None:
        """The pass was aborted (recovery)."""
        if self.log.kind:
            self.log.abandon()
        self._nested, self._to_begin = 0, None

    def forget(self, setter: str) -> None:
        """Compare options when the next pass starts, and agree anew on the steps of each kind of pass."""
        self._setters[setter] = None
        self.log.forget()

    # ---- steps ----

    def before(self, step: Step, *, optional: bool, can_join: CanJoin) -> Answer | Step:
        """Decide whether to take ``step`` now, or first another one that the others take and this rank can join.

        An ``optional`` step that others come to later is left until then.

        Raises:
            RuntimeError: on every rank: they do not all come to this step, and cannot.
        """
        log = self.log
        if self._nested and step == END:  # the pass around it goes on
            return Answer.TAKE
        if log.follow(step):
            return Answer.TAKE
        if self._to_begin is not None:
            kind = self._to_begin
            if step == END and not log.expects_steps(kind):
                self._to_begin = None
                return Answer.TAKE
            self._begin(kind, step)
            if log.follow(step):
                return Answer.TAKE
        if log.kind is None:  # between passes, and in a pass of one replica alone, nothing is compared
            return Answer.TAKE
        while (expected := log.expected) != step:
            if expected is not None:
                planned = log.decided is None
                if can_join(expected, planned):
                    return expected
                if (
                    optional
                    and (planned or step.kind == "gather")
                    and (log.decided is not None or log.expects_later(step))
                ):
                    return Answer.LATER
                if log.decided is not None:
                    did = {self.board.ranks[0]: self._did(log.kind, expected), -1: self._did(log.kind, step)}
                    self.board.fail(self.refuse(did), log.epoch)
            if self._electing:
                log.decide(self._choose(step, optional and step.kind == "gather"))
            elif log.open:
                break
            else:
                self._deviate(step)
                return Answer.TAKE
        log.take(step)
        return Answer.TAKE

    def _deviate(self, step: Step) -> None:
        """Leave the known way with ``step``, as all ranks do."""
        log = self.log
        rest = [one for one in (log.expected, *log.rest) if one is not None and one.group is not step.group]
        if step.part:  # what an extension sends is known once it ran; units that are alike send alike
            rest = [Step(one.kind, one.group, step.part) if _alike(one.group, step.group) else one for one in rest]
        self._meet(step)
        log.deviate(step, rest if log.guessed and log.deviations < _DEVIATIONS else None)

    def _meet(self, step: Step | None = None, *, begins: bool = False) -> None:
        """All ranks are here, and took the same steps in this pass, and want ``step``; or all of them raise."""
        log, board = self.log, self.board
        epoch, stand = log.epoch, _Stand(self, step, options=begins and bool(self._setters))

        def meet() -> None:
            if board.meet(epoch, str(stand.steps), stand) is None:
                board.settle(stand)

        meet() if self._electing else self._run(meet)
        log.met()

    def _choose(self, step: Step, prefetch: bool) -> Step:
        """What all ranks do next, each of which wants some ``step``, or could do without it where it is a prefetch."""
        log = self.log
        groups: Sequence[Member] = self._root.groups
        stand = _Stand(self, step, compares=False)
        want: dict[str, Any] = {"step": [step.kind, None, []]}
        if step.group is not None:
            number = groups.index(step.group)
            # Where ranks wait for each other's units, they go on with the first of them.
            want = {"step": [step.kind, number, list(step.part)], "order": self._order(log.kind, step)}
            want["optional"], want["prefetch"] = step.group.options.reduce_unused, prefetch
        chosen = self.board.choose(log.epoch, json.dumps(want), stand, _choose)
        if chosen is None:
            stand.compares = True
            self.board.settle(stand)
        log.met()
        kind, number, part = chosen
        return Step(kind, None if number is None else groups[number], tuple(part))

    def _order(self, kind: PassKind | None, step: Step) -> int:
        """Smaller for what comes earlier in a pass: a forward goes from first to last, a backward back."""
        groups: Sequence[Member] = self._root.groups
        number = -1 if step.group is None else groups.index(step.group)
        backward = kind is not None and kind.name == "backward"
        return -self._places.get(step.group, number) if backward else number

    # ---- what other ranks see ----

    def position(self) -> tuple[int, int]:
        """Where this rank stands."""
        return self.log.position

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """A number for the kind of the pass at a position and for each of its steps."""
        found = self.log.find(epoch, number)
        return None if found is None else self._digests(found[0], self._facts(*found))

    def _facts(self, kind: PassKind | None, steps: list[Step]) -> list[Step]:
        """What ranks compare of a pass: the units that it finds gathered, as if that were steps, and its steps.

        A rank whose forward skipped the unit that backward begins with comes to another backward than the others. These
        know theirs and go on without a meeting, while it waits for one, so this difference is all there is to see.
        """
        kept = () if kind is None else kind.kept
        return [*(Step("keep", self._root.groups[number]) for number in kept), *steps]

    def _digests(self, kind: object, steps: list[Step]) -> list[int]:
        # By their unit and what they hold: one rank may have a group more, for parameters that were added there alone.
        # Not by full names: experts are often named by a number that only their rank has.
        groups = {
            group: (number, [param.name.rpartition(".")[2] for param in group.params])
            for number, state in enumerate(self._root.all_states)
            for group in state.groups
        }
        numbers = [(one.kind, None if one.group is None else groups[one.group], one.part) for one in steps]
        return [zlib.crc32(repr(one).encode()) for one in (str(kind), *numbers)]

    def text(self, epoch: int, number: int, index: int) -> str:
        """One of these in words; empty if this rank has not come to it."""
        kind, steps = self.log.find(epoch, number) or (None, [])
        if not index:
            return "" if kind is None else str(kind)
        steps = self._facts(kind, steps)
        return self._did(kind, steps[index - 1]) if index <= len(steps) else ""

    def _did(self, kind: PassKind | None, step: Step) -> str:
        """One step, for ``refuse`` on another rank."""
        group, text = step.group, self._text(kind, step)
        if group is None:
            return json.dumps(_Did(text))
        order = (step.kind == "reduce", self._order(kind, step))
        return json.dumps(_Did(text, group.name, order, group.options.reduce_unused))

    def _text(self, kind: object, step: Step) -> str:
        group = step.group
        if group is None:
            return f"the end of {kind}"  # a kind of pass, in words
        text = f"{step.kind} {group.name or 'the root'!r} in {kind}"
        if step.kind == "keep":
            return f"{group.name or 'the root'!r} is gathered since forward in {kind}"
        if step.kind == "reduce":
            names = ", ".join(group.params[i].name for i in step.part[:3])
            return f"{text} ({names}{', ...' if len(step.part) > 3 else ''})"
        sizes = step.part[len(group.store.formats_digest) :]
        if group.store.formats_digest:
            encoded = {str(param.formats): param.name for param in group.params if any(param.formats)}
            text += f" with {'; '.join(f'{name}: {formats}' for formats, name in encoded.items())}"
        if sizes and group.store.extensions is not None:
            return f"{text} ({group.store.extensions.describe(sizes)})"
        several = sum(other.name == group.name for other in self._root.groups) > 1
        return f"{text} ({group.params[0].name}{', ...' if len(group.params) > 1 else ''})" if several else text

    def refuse(self, texts: dict[int, str]) -> str:
        """The error where ranks parted."""
        did = {rank: _Did(*json.loads(text)) if text.startswith("[") else text for rank, text in texts.items()}
        by_text: dict[str, list[int]] = {}
        for rank, one in did.items():
            by_text.setdefault(one if isinstance(one, str) else one.text, []).append(rank)
        parts = [
            f"{'this rank' if ranks == [-1] else 'rank ' + ', '.join(map(str, ranks))}: {text}"
            for text, ranks in by_text.items()
        ]
        return f"ranks do not do the same: {'; '.join(parts)}. Expected: {_REMEDY}{_skipping(list(did.values()))}"


class _Did(NamedTuple):
    """A step of one rank: in words, and with which unit (None at the end of a pass)."""

    text: str
    unit: str | None = None
    order: tuple[bool, int] = (False, 0)  # gathers before reductions, as they are prefetched; then as in the pass
    may_skip: bool = False  # the unit has set_reduce_scatter_unused_params(True)


def _skipping(did: list[_Did | str]) -> str:
    """What else is expected where some of the ranks skip a unit, given what each rank did; a str is no step."""
    steps = [one for one in did if isinstance(one, _Did)]
    units = [one for one in steps if one.unit is not None]
    if not units or len(steps) < len(did) or len({one.unit for one in steps}) == 1:
        return ""
    first = min(units, key=lambda one: one.order)  # a rank that is further on has skipped it
    name = repr(first.unit) if first.unit else "the root"
    if first.may_skip:
        return f"; some ranks may skip {name}, but all must meet the units that they use in the same order"
    line = "{}.set_reduce_scatter_unused_params(True)"
    unit = line.format(_in_python(first.unit or ""))
    every = f", or {line.format('model')} for every unit of the root" if first.unit else ""
    return f"; give each rank some input for {name}, or, where ranks may skip it, call `{unit}`{every}, on all ranks"


def _in_python(name: str) -> str:
    """The module of a unit as Python finds it in the root; the first one where the unit has several."""
    text = "model"
    for part in name.split(", ")[0].split(".") if name else ():
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text


class _Stand:
    """Where one rank stood when it came to a meeting, and which step it wants; the host may have gone on since."""

    def __init__(
        self, monitor: RankMonitor, step: Step | None, *, compares: bool = True, options: bool = False
    ) -> None:
        """``options`` changed: then the pass that begins is another one than elsewhere, and they are compared, too."""
        log = monitor.log
        self._monitor = monitor
        self._at = log.position
        self._kind, self._taken = log.kind, monitor._facts(log.kind, log.steps)
        self._wanted = [] if step is None else [step]
        self.compares = compares  # with what others want; else only with what they did
        self._options: list[Line] = options_of(monitor._root) if options else []
        self._title = f"{self._kind} after {', '.join(sorted(monitor._setters))}" if options else str(self._kind)
        self.steps = monitor._digests(self._title, [*self._taken, *self._wanted])
        self.steps += [zlib.crc32(line.compared.encode()) for line in self._options]

    def position(self) -> tuple[int, int]:
        """Where the rank stands."""
        return self._at

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Those of the monitor, with the wanted step."""
        if (epoch, number) != self._at:
            return self._monitor.digests(epoch, number)
        return self.steps if shown or self.compares else self.steps[: len(self._taken) + 1]

    def text(self, epoch: int, number: int, index: int) -> str:
        """The same in words."""
        if (epoch, number) != self._at:
            return self._monitor.text(epoch, number, index)
        texts = [self._title, *(self._monitor._did(self._kind, step) for step in (*self._taken, *self._wanted))]
        texts += [line.text for line in self._options]
        return texts[index] if index < len(texts) else ""

    def refuse(self, texts: dict[int, str]) -> str:
        """The error where ranks parted."""
        return self._monitor.refuse(texts)


def _alike(one: Member | None, other: Member | None) -> bool:
    """Whether two groups hold parameters of the same shapes and dtypes, and have extensions."""
    if one is None or other is None or one.store.extensions is None:
        return False
    signatures = [[(param.spec.layout.shape, param.dtype) for param in group.params] for group in (one, other)]
    return signatures[0] == signatures[1]


def _choose(wants: dict[int, Any]) -> Any:
    """The one of the ranks' ``wants`` that all of them can do; None if there is none."""
    if len(wants) == 1:
        return next(iter(wants.values()))["step"]
    optional = [want for want in wants.values() if want.get("optional")]
    if optional:
        return min(optional, key=lambda want: want["order"])["step"]
    # Where some ranks skip a unit, others prefetch another one there: it can wait for the one step that others need.
    needed = [want for want in wants.values() if not want.get("prefetch")]
    same = bool(needed) and all(want["step"] == needed[0]["step"] for want in needed)
    return needed[0]["step"] if same else None
