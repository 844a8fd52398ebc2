"""What the ranks of one root write for each other into a store: to meet, and to find out and name who parted.

A meeting costs a rank three operations, whatever the number of ranks, and leaves no key behind. Nobody polls: a rank
that waits for a meeting sleeps in the store. One that waits for long shows on the *board*, a single key, where it
stands; those who wait as well, here or for a collective, compare that with what they did.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

from fsdp2.ranks.store import Keys, StoreEnded

__all__ = ["Board", "Source"]

_PATIENCE = (2.0, 30.0)  # seconds that one waits for a meeting before one looks why it takes long; then again
_ANSWER_SECONDS = 4.0  # how long ranks that wait have to answer
_EXPLAIN_SECONDS = 8.0  # how long a failed collective is held until it is known why
_READ_SECONDS = 1.0  # for a key that was there a moment ago, and may have been deleted since
_COUNT_BITS = 17  # of the number of ranks; above them is the sum of what they want
_DIFFER = 1 << _COUNT_BITS


class Source(Protocol):
    """What this rank did, as other ranks compare it."""

    def position(self) -> tuple[int, int] | None:
        """Where this rank stands: two numbers that grow; None if nowhere."""

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """A number for each step taken at a position; None if this rank is not there yet, or it is long ago.

        What is ``shown`` to others may end with a step that this rank wants.
        """

    def text(self, epoch: int, number: int, index: int) -> str:
        """One of these steps in words; empty if it was not taken."""

    def refuse(self, texts: dict[int, str]) -> str:
        """The error, given what each rank did."""


def _digest(want: str) -> int:
    return zlib.crc32(want.encode()) >> 3


class Board:
    """What the ranks of one root write for each other below ``keys``.

    Several threads may come here at once: one that waits for a collective looks at the boards of all roots.
    """

    def __init__(self, keys: Keys, rank: int, ranks: tuple[int, ...], patience: float = 1800.0) -> None:
        self.rank, self.ranks = rank, ranks
        self.failure: str | None = None
        self._keys = keys
        self._patience = patience
        self._lock = RLock()  # for what follows; nobody waits for a meeting with it
        self._shown = ""  # what this rank wrote on the board
        self._answered = False

    # ---- meeting ----

    def meet(self, epoch: int, want: str, source: Source, last: Callable[[], str] | None = None) -> str | None:
        """Wait for all ranks; None if they want different things, else "", or what ``last`` returned on the last rank.

        Raises:
            RuntimeError: some rank failed, ended, or did not come.
        """
        self.check()
        try:
            return self._meet(epoch, want, source, last)
        except StoreEnded as error:
            self.failure = str(error)  # the pass that comes next cannot meet anybody, either
            raise

    def _meet(self, epoch: int, want: str, source: Source, last: Callable[[], str] | None) -> str | None:
        keys, ranks, mine = self._keys, len(self.ranks), _digest(want) << _COUNT_BITS | 1
        total = keys.add(f"meet/{epoch}", mine)
        if total % _DIFFER == ranks:
            same = total == ranks * mine
            keys.delete(f"meet/{epoch}")
            outcome = last() if same and last is not None else ""
            if last is not None:
                keys.set(f"chosen/{epoch}", outcome)
            left = keys.add(f"go/{epoch}", 1 if same else 1 + _DIFFER)
        else:
            same = self._wait_for(f"go/{epoch}", source) < _DIFFER
            outcome = keys.get(f"chosen/{epoch}") if last is not None and same else ""
            left = keys.add(f"go/{epoch}", 1)
        if left % _DIFFER != ranks:
            keys.note(f"go/{epoch}")
        else:
            if last is not None:
                keys.delete(f"chosen/{epoch}")
            # At the end: while this key is there, a process that hosts the store stays.
            keys.delete(f"go/{epoch}")
            keys.note(None)
        return outcome if same else None

    def _wait_for(self, key: str, source: Source) -> int:
        end, seconds = time.monotonic() + self._patience, _PATIENCE[0]
        try:
            while (value := self._keys.get_within(key, seconds)) is None:
                if time.monotonic() > end:
                    self.fail(
                        f"rank {self.rank} waited {self._patience:.0f} s, the timeout of its process group, for ranks "
                        "that did not come. Expected: every rank comes within this time; see what the other ranks "
                        "print, or pass a longer timeout to init_process_group"
                    )
                self.look(source, shows=True)
                if (ended := self._ended()) and not self._keys.has(key):
                    self.fail(ended)
                seconds = _PATIENCE[1]
            return int(value)
        finally:
            self.leave()

    def _ended(self) -> str:
        """What a rank that ended wrote; empty if none did."""
        # Whoever is the last to read of a failure deletes this key.
        return self._keys.get_within("ended", _READ_SECONDS) or "" if self._keys.has("ended") else ""

    def choose(self, epoch: int, want: str, source: Source, choose: Callable[[dict[int, Any]], Any]) -> Any:
        """What ``choose`` makes of all different wants (JSON values), each by a rank that has it, on all ranks.

        Each different want is written once, so this costs a rank no more where there are more of them.
        """
        keys, digest = self._keys, _digest(want)
        if keys.add(f"want/{epoch}/{digest}", 1) == 1:
            keys.set(f"slot/{epoch}/{keys.add(f'slots/{epoch}', 1)}", json.dumps([digest, self.rank, want]))

        def last() -> str:
            slots = [f"slot/{epoch}/{i + 1}" for i in range(keys.add(f"slots/{epoch}", 0))]
            wants = [json.loads(keys.get(slot)) for slot in slots]
            for key in (*slots, f"slots/{epoch}", *(f"want/{epoch}/{digest}" for digest, _, _ in wants)):
                keys.delete(key)
            return json.dumps(choose({rank: json.loads(want) for _, rank, want in wants}))

        return json.loads(self.meet(epoch, "", source, last) or "null")

    # ---- failing together ----

    def check(self) -> None:
        """Raise RuntimeError if some rank has failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def fail(self, text: str, epoch: int | None = None) -> None:
        """Raise RuntimeError here, and on every other rank as soon as it looks; the first text counts.

        Those who wait for the meeting ``epoch`` look at once.
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

    def settle(self, source: Source) -> None:
        """Raise RuntimeError with what each rank did, where a meeting found that they differ."""
        end = time.monotonic() + _ANSWER_SECONDS + _EXPLAIN_SECONDS
        while time.monotonic() < end:
            self.look(source, shows=True)
            time.sleep(0.02)
        self.fail(source.refuse({}))

    def look(self, source: Source, *, shows: bool) -> None:
        """Compare what is on the board, and if this rank ``shows`` itself, let others compare what it did.

        Raises:
            RuntimeError: some rank failed, or they parted.
        """
        with self._lock:
            self.check()
            self._look(source, shows)

    def _look(self, source: Source, shows: bool) -> None:
        position, mine = source.position(), ""
        if position is None or not shows:
            got = self._keys.get_within("board", _READ_SECONDS) or "" if self._keys.has("board") else ""
        else:
            mine = json.dumps({"rank": self.rank, "at": position, "steps": source.digests(*position, shown=True) or []})
            got = self._keys.compare_set("board", self._shown, mine)
            if self._shown and got in ("", self._shown) and got != mine:  # the key is gone, and not this rank's doing
                got = self._keys.compare_set("board", "", mine)
            if got == mine:
                self._shown = mine
                return
        self._shown = ""
        if got:
            self._read(got, source, mine)

    def _read(self, value: str, source: Source | None, mine: str = "") -> None:
        entry = json.loads(value)
        if "failure" in entry:
            self._fail_with(entry["failure"], entry["epoch"])
        elif source is None:
            return
        elif "parted" in entry:
            self._answer(entry, source)
        else:
            self._compare(value, entry, source, mine)

    def _compare(self, value: str, entry: dict[str, Any], source: Source, mine: str) -> None:
        (epoch, number), theirs = entry["at"], entry["steps"]
        ours = source.digests(epoch, number)
        differs = () if ours is None else (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
        index = next(iter(differs), None)
        if index is not None:
            self._part(value, {"parted": [epoch, number, index], "epoch": epoch, "by": self.rank}, source)
        elif mine and (ours is None or len(ours) < len(theirs)):
            # The board is for the one that is furthest behind: all others can compare what it did.
            if self._keys.compare_set("board", value, mine) == mine:
                self._shown = mine

    def _part(self, value: str, entry: dict[str, Any], source: Source) -> None:
        wanted = json.dumps(entry)
        got = self._keys.compare_set("board", value, wanted)
        if got == wanted:
            self._keys.add(f"go/{entry['epoch']}", _DIFFER)  # whoever waits for a meeting looks now
        if got:
            self._read(got, source)

    def _answer(self, entry: dict[str, Any], source: Source) -> None:
        """Write what this rank did where ranks parted; the one that found out collects what all did."""
        if not self._answered:
            self._answered = True
            at = entry["parted"]
            self._keys.set(f"did/{self.rank}", source.text(*at) if at else "is here")
        if entry["by"] != self.rank:
            return
        end, texts = time.monotonic() + _ANSWER_SECONDS, {}
        for rank in self.ranks:
            key, seconds = f"did/{rank}", end - time.monotonic()
            # Also when the time is over: this rank may have answered while another was waited for.
            text = self._keys.get_within(key, seconds) if seconds > 0 or self._keys.has(key) else None
            if text is not None:
                texts[rank] = text
        if entry["parted"]:
            self.fail(source.refuse({rank: text for rank, text in texts.items() if text}), entry["epoch"])
        silent = ", ".join(str(rank) for rank in self.ranks if rank not in texts)
        if silent:
            self.fail(
                f"rank {silent} did not answer for {_ANSWER_SECONDS:.0f} s after a collective failed: it was killed "
                "(out of memory? see dmesg and the launcher's output), or hangs outside of Python",
                entry["epoch"],
            )

    def _fail_with(self, text: str, epoch: int | None) -> None:
        """Take note of the failure; the last rank to do so removes all keys of it."""
        if self.failure is None:
            self.failure = text
            if self._answered:
                self._keys.delete(f"did/{self.rank}")
            if self._keys.add("read", 1) == len(self.ranks):
                for key in ("board", "ended", f"go/{epoch}", f"meet/{epoch}", "read"):
                    self._keys.delete(key)
            else:
                self._keys.note("read")
        self.check()

    def leave(self) -> None:
        """This rank waits no more."""
        with self._lock:
            shown, self._shown = self._shown, ""
            try:
                if shown and not self._keys.compare_set("board", shown, ""):
                    self._keys.delete("board")
            except StoreEnded:
                pass  # nobody can see the board, and this rank has what it waited for, or a better error

    def explain(self, source: Source) -> None:
        """Raise RuntimeError if it can be found out why a collective failed."""
        end = time.monotonic() + _EXPLAIN_SECONDS
        called = False
        while time.monotonic() < end:
            self.look(source, shows=True)
            if ended := self._ended():
                self.fail(ended)
            time.sleep(0.1)
            if not called and time.monotonic() > end - _EXPLAIN_SECONDS + 1:
                called = True
                epoch, _ = source.position() or (0, 0)
                with self._lock:
                    self._part(self._shown, {"parted": None, "epoch": epoch, "by": self.rank}, source)
        self.leave()

    def end(self, text: str) -> None:
        """This process ends: nobody shall wait for it."""
        self._keys.compare_set("ended", "", text)
