"""Log where a rank has waited for long, since when, and where the others are.

The passes of a model are compared (``monitor.py``). A collective that the user's code launches between them, such as
``full_tensor()``, a full state dict or a barrier, belongs to torch, and nobody is told of its start or its end. So a
thread looks every few seconds where the main thread is. If it has waited in a collective for some seconds, it asks all
ranks through the store where they are. Each one answers when its own thread looks next, even while it computes.

With NCCL the device waits in the collective, and the main thread for the device, at any line (``loss.item()``). A
thread that asked the device would spoil a graph that is being captured. So if ranks have devices, one whose main thread
has stood at one line for long asks too. It is logged only if all ranks stand, and not at the same line: ranks that wait
for their own devices alone, or load data, do so at the same line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable
from itertools import accumulate, chain, repeat, takewhile
from threading import Event, Thread, main_thread
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp2._torch.collectives import launched_collectives
from fsdp2.ranks.store import Keys

__all__ = ["Standstill"]

logger = logging.getLogger("fsdp2")

_LOOK_SECONDS = 5.0
_PATIENCE_SECONDS = 10.0  # a wait that takes so long is asked about
_STANDING_SECONDS = 20.0  # so is standing at one place, perhaps for a device
_ANSWER_LOOKS = 4  # looks after which a rank that has not answered does not; it may be late on a busy machine
_REMEDY = (
    "Expected: every rank comes to the same collectives in the same order, and runs as many steps as the others. A "
    "full tensor, a full state dict, an evaluation and a barrier need all ranks: call them outside of `if rank == 0:`"
)
_NO_ANSWER = "no answer: it was killed, or hangs outside of Python"
_NOT_YET = "it has not come to fully_shard"
_GONE = "has ended"
_ENDED = -1  # in the place of a question's number: the answer of a rank that has ended

_STANDARD = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WAITING = tuple(
    os.path.join(folder, *path)
    for folder, *path in (
        (_TORCH, "distributed", "distributed_c10d.py"),
        (_TORCH, "distributed", "_functional_collectives.py"),
        (_OWN, "comm", "host_work.py"),
        (_OWN, "ranks", "board.py"),
        (_OWN, "ranks", "process.py"),  # in the first collective, on which a device may wait
    )
)
_CALLED = {"pre_forward": "forward"}  # in a user's words
_DECORATORS = {"wrapper", "inner", "inner_func", "decorate_context", "new_func", "run"}


_Answer = tuple[str, int | None]
"""Where a rank is, and for how many seconds it has waited or stood there; None: it goes on."""


class _Place(NamedTuple):
    """Where the main thread is: in words, whether it waits in a collective there, and a number for this very visit."""

    text: str
    waits: bool
    visit: int


def _frames() -> list[FrameType]:
    """Return the frames of the main thread, the innermost first: torch reports no start or end of its collectives."""
    top: Any = sys._current_frames().get(main_thread().ident or 0)
    # No bytecode runs between one frame and the next, so the main thread does not go on meanwhile, and ends none.
    return list(takewhile(bool, accumulate(chain((top,), repeat("f_back")), getattr)))


def _is_users(path: str) -> bool:
    if path.startswith((_TORCH, _OWN, "<frozen")):
        return False
    return path.startswith(_INSTALLED) or not path.startswith(_STANDARD)


def _place(doing: Callable[[], str]) -> _Place:
    """Return where the main thread is; ``doing`` says what our own passes do."""
    inner, waits, own, visit = [], False, False, [launched_collectives()]
    line = ""
    for frame in _frames():
        path = frame.f_code.co_filename
        if line or _is_users(path):
            visit += [id(frame), frame.f_lasti]
            line = line or f"{_short(path)}:{frame.f_lineno}"
            continue
        waits = waits or path in _WAITING
        own = own or path in _WAITING[2:]
        inner.append(frame.f_code.co_name)
    called = [name for name in reversed(inner) if not name.startswith("_") and name not in _DECORATORS]
    what = (own and doing()) or (_CALLED.get(called[0], f"{called[0]}()") if called else "")
    return _Place(f"{what}, at {line}" if what and line else what or line, waits, hash(tuple(visit)))


def _short(path: str) -> str:
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path


class Standstill:
    """Where this process stands, and what it knows of the others. ``doing`` says what our own passes do.

    All ranks of the default process group are asked, whatever their meshes: pipelines and experts wait for each other
    across these.
    """

    def __init__(
        self, keys: Keys, rank: int, world: int, doing: Callable[[], str], *, on_devices: bool = False
    ) -> None:
        """``on_devices``: it may be a device that waits, at any place of the main thread."""
        self._keys, self._rank, self._world, self._doing = keys, rank, world, doing
        self._on_devices = on_devices
        self._place = _Place("", False, 0)
        self._since = time.monotonic()
        self._patience = _STANDING_SECONDS  # before this rank wants to know where the others are
        self._question = _Question()
        self._answered = 0  # the last question that this rank answered from its present place
        self._ended = Event()
        self._thread: Thread | None = None
        self._launched = 0  # collectives, when it came to its present place
        self.others = ""
        """Where the other ranks are, if this one has waited for them long enough to ask, and waits still."""

    def start(self) -> None:
        """Look every few seconds until the default process group is gone or this process ends."""
        if self._keys.has("asked"):  # torchrun keeps the store when it restarts the processes
            self._forget_question()
        self._keys.set(f"at/{self._rank}", json.dumps([0, "", None]))
        world = dist.group.WORLD
        assert world is not None
        alive = weakref.ref(world)
        del world

        def work() -> None:
            try:
                while not self._ended.wait(_LOOK_SECONDS) and alive() is not None:
                    self.look()
            except RuntimeError as error:  # mostly StoreEnded
                logger.debug("rank %d no longer looks where others are: %s", self._rank, error)

        self._thread = Thread(target=work, name="fsdp2-standstill", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LOOK_SECONDS)

    def end(self, *, failed: bool) -> None:
        """Stop looking, since this process ends, and answer for it. If it ``failed`` where it waited, say so again."""
        if self._thread is None or self._ended.is_set():
            return
        self.stop()
        if failed and self.others and launched_collectives() == self._launched:
            text = "rank %d failed where it waited for other ranks. When it last asked, %s. %s"
            logger.error(text, self._rank, self.others, _REMEDY)
        self._keys.set(f"at/{self._rank}", json.dumps([_ENDED, _GONE, None]))

    # ---- looking ----

    def look(self) -> None:
        """Look where the main thread is, answer the question of another rank, and log what ranks answered to it."""
        place = _place(self._doing)
        if place.visit != self._place.visit or place.waits != self._place.waits:
            self._since = time.monotonic()
            self._patience = _PATIENCE_SECONDS if place.waits else _STANDING_SECONDS
            self._answered, self.others, self._launched = 0, "", launched_collectives()
        self._place = place
        asked = self._keys.read("asked")
        self._question = self._question.seen(int(asked or 0))
        if asked is not None:
            self._answered = int(asked)
            self._keys.set(f"at/{self._rank}", json.dumps([int(asked), *self._answer()]))
            if not self._question.looks:
                self._keys.add(f"answered/{self._question.number}", 1)
        if self._stays:
            self._report()
            if self._seconds >= self._patience:
                self._ask()
        elif self._question.mine:
            self._forget_question()

    @property
    def _seconds(self) -> int:
        return int(time.monotonic() - self._since)

    @property
    def _stays(self) -> bool:
        """True if this rank waits for others, or if its device may."""
        return self._place.waits or (self._on_devices and self._seconds > 0)

    def _answer(self) -> _Answer:
        """Return where this rank is, and for how many seconds it has stayed there."""
        text = f"{'in' if self._place.waits else 'at'} {self._place.text}"
        return text, self._seconds if self._stays else None

    # ---- asking ----

    def _ask(self) -> None:
        """Ask all ranks where they are, or collect the answers to what this rank asked some looks ago."""
        question = self._question
        if not question.number:
            number = self._keys.add("questions", 1)
            if self._keys.compare_set("asked", "", str(number)) == str(number):
                self._question = _Question(number, mine=True)
        elif self._is_answered(question):
            self._keys.set("answers", json.dumps([question.number, self._collect(question.number)]))
            self._forget_question()
            self._report()

    def _is_answered(self, question: _Question) -> bool:
        """Return whether all ranks have answered, or had the time to; a rank that asked may have ended since."""
        if not question.mine:
            return question.looks >= 3 * _ANSWER_LOOKS
        return question.looks >= _ANSWER_LOOKS or self._keys.add(f"answered/{question.number}", 0) == self._world - 1

    def _forget_question(self) -> None:
        self._keys.delete("asked")
        self._keys.delete(f"answered/{self._question.number}")
        self._question = _Question()

    def _collect(self, number: int) -> dict[int, _Answer]:
        """Return what each rank answered to this question."""
        answers: dict[int, _Answer] = {}
        for rank in range(self._world):
            value = self._keys.read(f"at/{rank}")
            to, *answer = (number, _NOT_YET, None) if value is None else json.loads(value)
            answers[rank] = tuple(answer) if to in (number, _ENDED) else (_NO_ANSWER, None)
        return answers

    def _report(self) -> None:
        """Log the answers to the last question that this rank has answered from where it is, once."""
        if not self._answered or not self._keys.has("answers"):
            return
        number, answers = json.loads(self._keys.get("answers"))
        if number != self._answered:
            return
        self._answered, self._patience = 0, 2.0 * self._seconds
        if self._place.waits:
            what = "waits for other ranks"
        elif _none_goes_on([*answers.values()]):
            what = "does not go on, and no other rank does: their devices may wait for each other"
        else:
            return
        self.others = _in_words(answers, self._rank)
        logger.warning("rank %d %s. R%s. %s", self._rank, what, self.others[1:], _REMEDY)


def _none_goes_on(answers: list[_Answer]) -> bool:
    """Return whether all ranks that have not ended stay where they are, and not all at one place.

    A rank that waits for one that ended is told by the boards: the last one may just save its checkpoint.
    """
    left = [one for one in answers if one[0] != _GONE]
    stay = [text == _NO_ANSWER or (seconds or 0) >= _PATIENCE_SECONDS for text, seconds in left]
    return all(stay) and len({text for text, _ in left}) > 1


def _in_words(answers: dict[str, _Answer], first: int) -> str:
    """Return the ``answers`` of all ranks, ranks at one place together, that of rank ``first`` first."""
    together: dict[str, tuple[list[str], list[int]]] = {}
    for rank, (text, seconds) in sorted(answers.items(), key=lambda one: int(one[0]) != first):
        ranks, waited = together.setdefault(text, ([], []))
        ranks.append(rank)
        waited += [] if seconds is None else [seconds]
    parts = []
    for text, (ranks, waited) in together.items():
        span = " to ".join(map(str, sorted({min(waited), max(waited)}))) if waited else ""
        parts.append(f"rank {', '.join(ranks)}: {text}" + (f", for {span} s" if span else ""))
    return "; ".join(parts)


class _Question(NamedTuple):
    """A question where all ranks are: its number, 0 for none; the looks since it was seen first; who asked it."""

    number: int = 0
    looks: int = 0
    mine: bool = False

    def seen(self, number: int) -> _Question:
        """Return the question that a look sees now."""
        return self._replace(looks=self.looks + 1) if number == self.number else _Question(number)
