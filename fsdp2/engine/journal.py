"""The steps of the ranks: which collectives follow which, as all ranks agreed, to tell where one parts from the others.

A *pass* is a forward or a backward under one root; its *steps* are the collectives that it starts. As long as every
pass takes the steps that the last one of its kind took after the same passes, all ranks do the same without a word (the
second forward of an iteration may find units that the first one left gathered). Plain bookkeeping: no communication, no
tensors.
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Journal", "Step"]

Step = tuple[str, Any, Any]  # what, the group or None, which part of it

_REMEMBERED = 1024
_PASSES_BEFORE = (32, 16, 8, 4, 2, 1)  # so many say what comes next, the longest that is known; 32: 16 micro-batches
_MOST_PLACES = 4096  # known at a time: loops without a pattern make ever new ones


class Journal:
    """What this rank did under one root, and what all ranks expect it to do next."""

    def __init__(self) -> None:
        self.kind = ""  # of the pass that runs; empty between passes
        self.index = 0  # of the next step, counted over all passes
        self._before: tuple[str, ...] = ()  # the kinds of the passes before; empty at the start and after one broke off
        self._next: dict[tuple[str, ...], str] = {}  # after these kinds
        self._agreed: dict[tuple[str, ...], list[Step]] = {}  # by kinds before and its own; by its own alone
        self._keys: list[tuple[str, ...]] = []  # of the pass that runs, in ``_agreed``
        self._track: list[Step] | None = None  # what the running pass is expected to do; None: nobody knows
        self._steps: list[Step] = []
        self._decided: Step | None = None
        self.places: dict[Any, int] = {}  # of the groups in the last forward
        self._recent: deque[tuple[int, str, Step]] = deque(maxlen=_REMEMBERED)  # read by another thread

    @property
    def expected(self) -> Step | None:
        """The next step, if all ranks know it."""
        if self._decided is not None:
            return self._decided
        if self._track is None:
            return None
        position = len(self._steps)
        return self._track[position] if position < len(self._track) else None

    def expects_later(self, step: Step) -> bool:
        """Whether the running pass will come to ``step``, but not now."""
        return self._track is not None and step in self._track[len(self._steps) + 1 :]

    def follow(self, step: Step) -> bool:
        """Take ``step`` if it comes now as it did in the pass that is repeated, and say so; every step asks this."""
        track, steps = self._track, self._steps
        position = len(steps)
        if track is None or position >= len(track) or track[position] != step:
            return False
        steps.append(step)
        self._recent.append((self.index, self.kind, step))
        self.index += 1
        return True

    def took(self, step: Step) -> None:
        """This rank takes ``step``, which is the expected one."""
        self._decided = None
        self._steps.append(step)
        self._note(step)

    @property
    def on_track(self) -> bool:
        """Whether the running pass does what the last one in its place did, or the last of its kind."""
        return self._track is not None

    def decide(self, step: Step) -> None:
        """All ranks know now that ``step`` is next; what follows is not known."""
        self._decided, self._track = step, None

    def leave(self) -> None:
        """This rank cannot take the expected step: nobody knows any more what is next."""
        self._decided = self._track = None

    def follows(self, kind: str) -> bool:
        """Whether all ranks expect a pass of ``kind`` now."""
        known = (self._next[before] for before in self._lately() if before in self._next)
        return not self.kind and next(known, None) == kind

    def _lately(self) -> list[tuple[str, ...]]:
        return [self._before[-n:] for n in _PASSES_BEFORE if n <= len(self._before)]

    def begin(self, kind: str) -> None:
        """A pass starts, as all ranks know."""
        if len(self._next) > _MOST_PLACES:
            self._next.clear()
            self._agreed.clear()
        lately = self._lately()
        self._next.update(dict.fromkeys(lately, kind))
        self._keys = [*((*before, kind) for before in lately), (kind,)]
        self._before = (*self._before, kind)[-_PASSES_BEFORE[0] :]
        self.kind = kind
        self._track = next((self._agreed[place] for place in self._keys if place in self._agreed), None)
        self._steps, self._decided = [], None
        self._note(("begin", None, kind))

    def end(self) -> None:
        """The pass is over, as all ranks know."""
        self._agreed.update(dict.fromkeys(self._keys, self._steps))
        if self.kind == "forward":
            self.places = {group: i for i, (_, group, _) in enumerate(self._steps)}
        self.kind, self._track, self._steps = "", None, []

    def forget_steps(self) -> None:
        """What the next pass of each kind will do is not known; the one that runs goes on as it is."""
        self._agreed.clear()

    def abandon(self) -> None:
        """The pass broke off, on this rank at least."""
        self.kind, self._track, self._steps, self._decided = "", None, [], None
        self._before = ()

    def _note(self, step: Step) -> None:
        self._recent.append((self.index, self.kind, step))
        self.index += 1

    def recent(self) -> tuple[int, list[tuple[str, Step]]]:
        """(Index of the first, steps): the latest that were taken, each with the kind of its pass."""
        taken = list(self._recent)
        return taken[0][0] if taken else self.index, [(kind, step) for _, kind, step in taken]
