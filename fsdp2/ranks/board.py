"""Meetings of the ranks of one root in a store, and errors that all ranks raise.

A *meeting* returns when all ranks have joined it, and tells each of them whether all joined with the same collectives.
It costs a rank three operations of the store, for any number of ranks, and leaves no key behind. A rank does not poll
while it waits: it sleeps in the store. After two seconds it does, and writes its position and its collectives to the
*board*, a single key. Other ranks that wait, for a meeting or for a collective, compare the board with their own
collectives. The first rank that finds a difference collects what all ranks did and writes the error, which every rank
then raises.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

from fsdp2.ranks.store import HOST_ENDED, Keys, StoreEnded

__all__ = ["Board", "History", "latest"]

_LOOK_SECONDS = (2.0, 30.0)  # between looks at the board while a meeting takes long: the first wait, and the longest
_POLL_SECONDS = 0.5  # between looks for the end of a meeting that takes longer than the first of these
_ANSWER_SECONDS = 4.0  # the time for waiting ranks to answer
_EXPLAIN_SECONDS = 8.0  # the time to find the reason of a failed collective
_COUNT_BITS = 17  # a meeting's counter has the number of ranks in these bits, and the sum of digests above them
_DIFFER = 1 << _COUNT_BITS


class History(Protocol):
    """The collectives of this rank, as other ranks compare them."""

    def position(self) -> tuple[int, int] | None:
        """Return this rank's position, two numbers that grow (epoch, pass number), or None if it has none."""

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Return a number for each collective at a position, or None if this rank is not there yet or it is long ago.

        With ``shown``, the list is for other ranks, and may end with a collective that this rank is about to launch.
        """

    def text(self, epoch: int, number: int, index: int) -> str:
        """Return one of these collectives in words, or "" if this rank has not launched it."""

    def refuse(self, texts: dict[int, str]) -> str:
        """Return the error text, given the collective of each rank in words."""

    def turns(self) -> tuple[bool, bool]:
        """Return whether this rank came to its position directly from the one before, and whether it has left it.

        Between the two, and behind it, are passes of other roots.
        """


def latest(history: History) -> str:
    """Return in words what this rank did last, or is about to do: a collective, or a kind of pass."""
    at = history.position()
    count = len((at and history.digests(*at, shown=True)) or ())
    text = history.text(*at, count - 1) if at and count else ""
    return str(json.loads(text)[0]) if text.startswith("[") else text


def _reached(history: History) -> list[int]:
    """Return how far a rank has come: a position, and the number of collectives there. It grows, on all ranks alike."""
    at = history.position()
    return [] if at is None else [*at, len(history.digests(*at) or ())]


def _apart(entry: dict[str, Any], history: History) -> list[int] | None:
    """Return the position to which one of two ranks came directly, while the other went to another root first."""
    theirs, ours = tuple(entry["at"]), history.position()
    if ours is None:
        return None
    (they_came_directly, they_left), (came_directly, left) = entry["turns"], history.turns()
    if theirs == (ours[0], ours[1] + 1) and left and they_came_directly:
        return [*theirs, 0]
    if ours == (theirs[0], theirs[1] + 1) and they_left and came_directly:
        return [*ours, 0]
    return None


def _digest(want: str) -> int:
    """Return 29 bits, so that the sum over 2**17 ranks fits the store's counter above the number of ranks that came.

    Different wishes whose sum is that of equal ones by chance (one in 2**29) are taken for agreement.
    """
    return zlib.crc32(want.encode()) >> 3


class Board:
    """The meetings and the board of the ranks of one root, in the keys below ``keys``.

    Several threads may use it at once: a thread that waits for a collective looks at the boards of all roots.

    | key                    | value                                                                                |
    |------------------------|--------------------------------------------------------------------------------------|
    | meet/EPOCH             | how many ranks have come to a meeting, and above that the sum of their digests       |
    | go/EPOCH               | how many have left it, and above that whether they differ; ranks wait for this key   |
    | chosen/EPOCH           | what the last rank has chosen for all                                                |
    | want/EPOCH/DIGEST      | how many ranks want the same                                                         |
    | wanted/EPOCH/NUMBER    | one of these wishes, and the rank that came with it first                            |
    | wanted_count/EPOCH     | the number of different wishes                                                       |
    | board                  | what one rank did, if ranks differ ("parted"), or an error for all ("failure")       |
    | did/RANK               | what this rank did if ranks differ                                                   |
    | read                   | how many ranks have read the error                                                   |
    | ended                  | of ranks that ended without an error, the one that came least far: what it did last, |
    |                        | in words, and its epoch, pass number and count of collectives                        |
    """

    def __init__(
        self,
        keys: Keys,
        rank: int,
        ranks: tuple[int, ...],
        timeout: float = 1800.0,
        others: Callable[[], str] = lambda: "",
        look_elsewhere: Callable[[Board], None] = lambda board: None,
    ) -> None:
        """``others()`` returns where other ranks are if this one has waited for them for a long time, otherwise "".

        ``look_elsewhere(board)`` looks at the boards of other roots, where ranks may wait for this one.
        """
        self.rank, self.ranks = rank, ranks
        self._others = others
        self._look_elsewhere = look_elsewhere
        self.failure: str | None = None  # the error that all ranks raise from now on
        self.on_failure: Callable[[str], None] = lambda text: None  # tells ranks that are not among these
        self._keys = keys
        self._timeout = timeout
        self._lock = RLock()  # for the attributes below; not held while a thread waits for a meeting
        self._shown = ""  # the value that this rank wrote on the board
        self._answered = False  # this rank wrote what it did if ranks differ

    # ---- meeting ----

    def meet(self, epoch: int, want: str, history: History, last: Callable[[], str] | None = None) -> str | None:
        """Wait for all ranks. Return None if their ``want`` differ; otherwise the last rank's ``last()``, or "".

        Raises:
            RuntimeError: A rank failed, ended, or did not come in time.
        """
        self.check()
        try:
            return self._meet(epoch, want, history, last)
        except StoreEnded as error:
            self.failure = self._without(HOST_ENDED, history)  # later passes cannot meet either
            raise StoreEnded(self.failure) from error

    def _meet(self, epoch: int, want: str, history: History, last: Callable[[], str] | None) -> str | None:
        keys, ranks, mine = self._keys, len(self.ranks), _digest(want) << _COUNT_BITS | 1
        # The counter has the number of ranks that have come and, above these bits, the sum of their digests.
        total = keys.add(f"meet/{epoch}", mine)
        if total % _DIFFER == ranks:  # this rank is the last: it compares, and wakes the others through "go"
            same = total == ranks * mine
            keys.delete(f"meet/{epoch}")
            outcome = last() if same and last is not None else ""
            if last is not None:
                keys.set(f"chosen/{epoch}", outcome)
            left = keys.add(f"go/{epoch}", 1 if same else 1 + _DIFFER)
        else:
            same = self._wait_for(f"go/{epoch}", history) < _DIFFER
            outcome = keys.get(f"chosen/{epoch}") if last is not None and same else ""
            left = keys.add(f"go/{epoch}", 1)
        if left % _DIFFER != ranks:  # other ranks have still to read "go"
            keys.note(f"go/{epoch}")
        else:
            if last is not None:
                keys.delete(f"chosen/{epoch}")
            # Delete this key last: the process that hosts the store does not end while it exists.
            keys.delete(f"go/{epoch}")
            keys.note(None)
        return outcome if same else None

    def _wait_for(self, key: str, history: History) -> int:
        end = time.monotonic() + self._timeout
        pause, longest = _LOOK_SECONDS
        try:
            value = self._keys.get_within(key, pause)
            while value is None:
                if time.monotonic() > end:
                    others = self._others()
                    others = f"; when it last asked, {others}" if others else ""
                    self.fail(
                        f"rank {self.rank} waited {self._timeout:.0f} s, the timeout of its process group, for ranks "
                        f"that did not come{others}. Expected: every rank comes within this time; see what the other "
                        "ranks print, or pass a longer timeout to init_process_group"
                    )
                # The meeting takes a long time: show other ranks where this one is, and compare with them.
                self.look(history, shows=True)
                self._look_elsewhere(self)
                if (ended := self.ended()) and not self._keys.has(key):
                    self.fail(self._without(ended, history))
                value = self._keys.poll(key, min(pause, end - time.monotonic()), _POLL_SECONDS)
                pause = min(2 * pause, longest)
            return int(value)
        finally:
            self.leave()

    def ended(self) -> str:
        """Return the text of a rank that ended, or "" if none did."""
        return self._ended()[0]

    def _ended(self) -> tuple[str, list[int]]:
        """Return the text of a rank that ended, and how far it came."""
        text, reached = json.loads(self._keys.read("ended") or '["", []]')
        return text, reached

    def refuse_ended(self, history: History) -> None:
        """Look whether this rank waits on its device for one that ended.

        Raises:
            RuntimeError: A rank ended, and has not launched what this one has.
        """
        text, reached = self._ended()
        if text and reached < _reached(history):
            self.check()
            self.fail(self._without(text, history))

    def _without(self, ended: str, history: History) -> str:
        """Return the error text of a rank that waits for one that ended, which says ``ended``."""
        doing = latest(history)
        waits = f"rank {self.rank} waits for it" + (f" in {doing}" if doing else "")
        return (
            f"{ended}; {waits}. Expected: every rank runs as many forwards and backwards as the others. Give all ranks "
            "the same number of batches (drop_last=True of DistributedSampler and DataLoader), or stop all ranks with "
            "the first"
        )

    def choose(self, epoch: int, want: str, history: History, choose: Callable[[dict[int, Any]], Any]) -> Any:
        """Meet, and return on all ranks the result of ``choose`` for the different wants (JSON values) by rank.

        Equal wants are written once, so the cost does not grow with the number of ranks.
        """
        keys, digest = self._keys, _digest(want)
        if keys.add(f"want/{epoch}/{digest}", 1) == 1:
            keys.set(f"wanted/{epoch}/{keys.add(f'wanted_count/{epoch}', 1)}", json.dumps([digest, self.rank, want]))

        def last() -> str:
            wanted = [f"wanted/{epoch}/{i + 1}" for i in range(keys.add(f"wanted_count/{epoch}", 0))]
            wants = [json.loads(keys.get(key)) for key in wanted]
            for key in (*wanted, f"wanted_count/{epoch}", *(f"want/{epoch}/{digest}" for digest, _, _ in wants)):
                keys.delete(key)
            return json.dumps(choose({rank: json.loads(want) for _, rank, want in wants}))

        return json.loads(self.meet(epoch, "", history, last) or "null")

    # ---- failing together ----

    def check(self) -> None:
        """Raise RuntimeError if any rank has failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def fail(self, text: str, epoch: int | None = None) -> None:
        """Raise RuntimeError on this rank, and on every other rank when it looks at the board; the first text counts.

        Ranks that wait for the meeting ``epoch`` look immediately.
        """
        self.check()
        wanted, seen = json.dumps({"failure": text, "epoch": epoch}), ""
        with self._lock:
            while (got := self._keys.compare_set("board", seen, wanted)) != wanted:
                if "failure" in json.loads(got or "{}"):
                    break
                seen = got
            if epoch is not None:
                self._keys.add(f"go/{epoch}", _DIFFER)
            self._read(got, None)

    def raise_difference(self, history: History) -> None:
        """Raise RuntimeError with the collectives of each rank, after a meeting whose ranks differ."""
        end = time.monotonic() + _ANSWER_SECONDS + _EXPLAIN_SECONDS
        while time.monotonic() < end:
            self.look(history, shows=True)
            time.sleep(0.02)
        self.fail(history.refuse({}))

    def look(self, history: History, *, shows: bool) -> None:
        """Compare the board with this rank's collectives; if it ``shows`` itself, write these for others to compare.

        Raises:
            RuntimeError: A rank failed, or ranks differ.
        """
        with self._lock:
            self.check()
            self._look(history, shows)

    def _look(self, history: History, shows: bool) -> None:
        position, mine = history.position(), ""
        if position is None or not shows:
            got = self._keys.read("board") or ""
        else:
            digests = history.digests(*position, shown=True) or []
            mine = json.dumps({"rank": self.rank, "at": position, "digests": digests, "turns": history.turns()})
            got = self._keys.compare_set("board", self._shown, mine)
            if self._shown and got in ("", self._shown) and got != mine:  # another rank has deleted the key
                got = self._keys.compare_set("board", "", mine)
            if got == mine:
                self._shown = mine
                return
        self._shown = ""
        if got:
            self._read(got, history, mine)

    def _read(self, value: str, history: History | None, mine: str = "") -> None:
        entry = json.loads(value)
        if "failure" in entry:
            self._fail_with(entry["failure"], entry["epoch"])
        elif history is None:
            return
        elif "parted" in entry:
            self._answer(entry, history)
        else:
            self._compare(value, entry, history, mine)

    def _compare(self, value: str, entry: dict[str, Any], history: History, mine: str) -> None:
        (epoch, number), theirs = entry["at"], entry["digests"]
        ours = history.digests(epoch, number)
        differs = () if ours is None else (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
        index = next(iter(differs), None)
        parted = [epoch, number, index] if index is not None else _apart(entry, history)
        if parted is not None:
            self._announce_difference(value, {"parted": parted, "epoch": epoch, "by": self.rank}, history)
        elif mine and (ours is None or len(ours) < len(theirs)):
            # The rank that is furthest behind shows its collectives: all others can compare them.
            if self._keys.compare_set("board", value, mine) == mine:
                self._shown = mine

    def _announce_difference(self, value: str, entry: dict[str, Any], history: History) -> None:
        wanted = json.dumps(entry)
        got = self._keys.compare_set("board", value, wanted)
        if got == wanted:
            self._keys.add(f"go/{entry['epoch']}", _DIFFER)  # wakes ranks that wait for a meeting, and these look
        if got:
            self._read(got, history)

    def _answer(self, entry: dict[str, Any], history: History) -> None:
        """Write this rank's collective at the difference. The rank that found it collects those of all ranks."""
        if not self._answered:
            self._answered = True
            at = entry["parted"]
            self._keys.set(f"did/{self.rank}", history.text(*at) if at else "is here")
        if entry["by"] != self.rank:
            return
        end, texts = time.monotonic() + _ANSWER_SECONDS, {}
        for rank in self.ranks:
            key, seconds = f"did/{rank}", end - time.monotonic()
            # Also after the time limit: the rank may have answered while this one waited for another.
            text = self._keys.poll(key, seconds, 0.02)
            if text is not None:
                texts[rank] = text
        if entry["parted"]:
            self.fail(history.refuse({rank: text for rank, text in texts.items() if text}), entry["epoch"])
        silent = ", ".join(str(rank) for rank in self.ranks if rank not in texts)
        if silent:
            self.fail(
                f"rank {silent} did not answer for {_ANSWER_SECONDS:.0f} s after a collective failed: it was killed "
                "(out of memory? see dmesg and the launcher's output), or aborted (its own output says why: a "
                "collective that not all ranks called?), or hangs outside of Python",
                entry["epoch"],
            )

    def _fail_with(self, text: str, epoch: int | None) -> None:
        """Record the failure and raise it; the last rank that does so deletes all its keys."""
        if self.failure is None:
            self.failure = text
            if self._answered:
                self._keys.delete(f"did/{self.rank}")
            if self._keys.add("read", 1) == len(self.ranks):
                for key in ("board", "ended", f"go/{epoch}", f"meet/{epoch}", "read"):
                    self._keys.delete(key)
            else:
                self._keys.note("read")
            self.on_failure(text)
        self.check()

    def leave(self) -> None:
        """Remove this rank's collectives from the board, because its wait is over."""
        with self._lock:
            shown, self._shown = self._shown, ""
            try:
                if shown and not self._keys.compare_set("board", shown, ""):
                    self._keys.delete("board")
            except StoreEnded:
                pass  # no rank can read the board any more; this rank has what it waited for, or a better error

    def explain(self, history: History) -> None:
        """Raise RuntimeError with the reason of a failed collective, if one is found in time."""
        try:
            self._explain(history)
        except StoreEnded as error:
            raise StoreEnded(self._without(HOST_ENDED, history)) from error

    def _explain(self, history: History) -> None:
        end = time.monotonic() + _EXPLAIN_SECONDS
        called = False
        while time.monotonic() < end:
            self.look(history, shows=True)
            self._look_elsewhere(self)
            if ended := self.ended():
                self.fail(self._without(ended, history))
            time.sleep(0.1)
            if not called and time.monotonic() > end - _EXPLAIN_SECONDS + 1:
                called = True
                epoch, _ = history.position() or (0, 0)
                with self._lock:
                    self._announce_difference(self._shown, {"parted": None, "epoch": epoch, "by": self.rank}, history)
        self.leave()

    def end(self, text: str, history: History, epoch: int | None) -> None:
        """Tell other ranks that this process ends, so that they do not wait for it.

        With ``epoch``, the number of the next meeting, it ends with an error, which ranks that wait raise. Otherwise
        those raise that have launched more than the one which came least far.
        """
        if epoch is not None:
            with contextlib.suppress(RuntimeError):  # the error is this rank's own
                self.fail(text, epoch)
            return
        reached, seen = _reached(history), ""
        mine = json.dumps([text, reached])
        while (got := self._keys.compare_set("ended", seen, mine)) != mine and reached < json.loads(got)[1]:
            seen = got
