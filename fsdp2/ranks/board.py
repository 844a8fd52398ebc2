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
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["Board", "Source"]

_PATIENCE = (2.0, 30.0)  # seconds that one waits for a meeting before one looks why it takes long; then again
_ANSWER_SECONDS = 4.0  # how long ranks that wait have to answer
_EXPLAIN_SECONDS = 8.0  # how long a failed collective is held until it is known why
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
    """The keys of one root below ``store``, whose ``get`` waits no longer than this object sets it to."""

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], patience: float = 1800.0) -> None:
        self.rank, self.ranks = rank, ranks
        self.failure: str | None = None
        self._store = store
        self._patience = patience
        self._shown = ""  # what this rank wrote on the board
        self._answered = False

    # ---- meeting ----

    def meet(self, epoch: int, want: str, source: Source, last: Callable[[], str] | None = None) -> str | None:
        """Wait for all ranks; None if they want different things, else "", or what ``last`` returned on the last rank.

        Raises:
            RuntimeError: some rank failed, ended, or did not come.
        """
        self.check()
        store, ranks = self._store, len(self.ranks)
        total = store.add(f"meet/{epoch}", _digest(want) << _COUNT_BITS | 1)
        if total % _DIFFER == ranks:
            same = total == ranks * (_digest(want) << _COUNT_BITS | 1)
            store.delete_key(f"meet/{epoch}")
            outcome = last() if same and last is not None else ""
            if last is not None:
                store.set(f"chosen/{epoch}", outcome)
            left = store.add(f"go/{epoch}", 1 if same else 1 + _DIFFER)
        else:
            same = self._wait_for(f"go/{epoch}", source) < _DIFFER
            outcome = store.get(f"chosen/{epoch}").decode() if last is not None and same else ""
            left = store.add(f"go/{epoch}", 1)
        if left % _DIFFER == ranks:
            store.delete_key(f"go/{epoch}")
            if last is not None:
                store.delete_key(f"chosen/{epoch}")
        return outcome if same else None

    def _wait_for(self, key: str, source: Source) -> int:
        end, seconds = time.monotonic() + self._patience, _PATIENCE[0]
        try:
            while True:
                self._store.set_timeout(timedelta(seconds=seconds))
                try:
                    return int(self._store.get(key))
                except dist.DistNetworkError as error:
                    raise RuntimeError(f"the process that hosts the store ended: {error}") from error
                except dist.DistStoreError:
                    pass
                if time.monotonic() > end:
                    self.fail(f"rank {self.rank} waited {self._patience:.0f} s for ranks that did not come")
                self.look(source, shows=True)
                if self._store.check(["ended"]) and not self._store.check([key]):
                    self.fail(self._store.get("ended").decode())
                seconds = _PATIENCE[1]
        finally:
            self.leave()

    def choose(self, epoch: int, want: str, source: Source, choose: Callable[[dict[int, Any]], Any]) -> Any:
        """What ``choose`` makes of all different wants (JSON values), each by a rank that has it, on all ranks.

        Each different want is written once, so this costs a rank no more where there are more of them.
        """
        store, digest = self._store, _digest(want)
        if store.add(f"want/{epoch}/{digest}", 1) == 1:
            store.set(f"slot/{epoch}/{store.add(f'slots/{epoch}', 1)}", json.dumps([digest, self.rank, want]))

        def last() -> str:
            slots = [f"slot/{epoch}/{i + 1}" for i in range(store.add(f"slots/{epoch}", 0))]
            wants = [json.loads(store.get(slot)) for slot in slots]
            for key in (*slots, f"slots/{epoch}", *(f"want/{epoch}/{digest}" for digest, _, _ in wants)):
                store.delete_key(key)
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
        while (got := self._store.compare_set("board", seen, wanted).decode()) != wanted:
            if "failure" in json.loads(got or "{}"):
                break
            seen = got
        if epoch is not None:
            self._store.add(f"go/{epoch}", _DIFFER)
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
        self.check()
        position = source.position()
        if position is None or not shows:
            got = self._store.get("board").decode() if self._store.check(["board"]) else ""
        else:
            mine = json.dumps({"rank": self.rank, "at": position, "steps": source.digests(*position, shown=True)})
            got = self._store.compare_set("board", self._shown, mine).decode()
            if self._shown and got in ("", self._shown) and got != mine:  # the key is gone, and not this rank's doing
                got = self._store.compare_set("board", "", mine).decode()
            if got == mine:
                self._shown = mine
                return
        self._shown = ""
        if got:
            self._read(got, source, mine if position is not None and shows else "")

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
            if self._store.compare_set("board", value, mine).decode() == mine:
                self._shown = mine

    def _part(self, value: str, entry: dict[str, Any], source: Source) -> None:
        wanted = json.dumps(entry)
        got = self._store.compare_set("board", value, wanted).decode()
        if got == wanted:
            self._store.add(f"go/{entry['epoch']}", _DIFFER)  # whoever waits for a meeting looks now
        if got:
            self._read(got, source)

    def _answer(self, entry: dict[str, Any], source: Source) -> None:
        """Write what this rank did where ranks parted; the one that found out collects what all did."""
        if not self._answered:
            self._answered = True
            at = entry["parted"]
            self._store.set(f"did/{self.rank}", source.text(*at) if at else "is here")
        if entry["by"] != self.rank:
            return
        answers = [f"did/{rank}" for rank in self.ranks]
        try:
            self._store.wait(answers, timedelta(seconds=_ANSWER_SECONDS))
        except dist.DistStoreError:
            answers = [key for key in answers if self._store.check([key])]
        texts = {int(key[4:]): self._store.get(key).decode() for key in answers}
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
                self._store.delete_key(f"did/{self.rank}")
            if self._store.add("read", 1) == len(self.ranks):
                for key in ("board", "read", "ended", f"go/{epoch}", f"meet/{epoch}"):
                    self._store.delete_key(key)
        self.check()

    def leave(self) -> None:
        """This rank waits no more."""
        if self._shown:
            if not self._store.compare_set("board", self._shown, "").decode():
                self._store.delete_key("board")
            self._shown = ""

    def explain(self, source: Source) -> None:
        """Raise RuntimeError if it can be found out why a collective failed."""
        end = time.monotonic() + _EXPLAIN_SECONDS
        called = False
        while time.monotonic() < end:
            self.look(source, shows=True)
            if self._store.check(["ended"]):
                self.fail(self._store.get("ended").decode())
            time.sleep(0.1)
            if not called and time.monotonic() > end - _EXPLAIN_SECONDS + 1:
                called = True
                epoch, _ = source.position() or (0, 0)
                self._part(self._shown, {"parted": None, "epoch": epoch, "by": self.rank}, source)
        self.leave()

    def end(self, text: str) -> None:
        """This process ends: nobody shall wait for it."""
        self._store.compare_set("ended", "", text)
