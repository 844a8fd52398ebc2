"""Find the rank that hangs, from the last step of every rank and the stacks of its threads."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Frame", "Stuck", "describe", "hanging", "innermost"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_WAITS = ("/torch/distributed/", "/torch/cuda/", "/fsdp2/comm/", "/fsdp2/ranks/", "/fsdp2/tools/check/place.py")
"""Files in whose functions a rank waits for others."""
_PASSED = ("/fsdp2/_torch/", "/torch/utils/", "/torch/_ops.py", "/torch/autograd/", "/torch/_tensor.py")
"""Files whose frames only call code of others."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.split('/')[-3:])}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Stuck:
    """The state of a rank without progress; ``dump`` is the output of faulthandler, or ""."""

    rank: int
    doing: str
    dump: str

    @property
    def frame(self) -> Frame | None:
        """The line that the rank executes."""
        return innermost(self.dump)

    @property
    def waits(self) -> bool:
        """True if the rank waits for other ranks."""
        return self.frame is not None and any(part in self.frame.file for part in _WAITS)

    def __str__(self) -> str:
        where = self.frame
        return f"rank {self.rank}, {self.doing}{f', at {where}' if where else ''}"


def innermost(dump: str) -> Frame | None:
    """Return the most informative line of a worker's stacks: the innermost that is not in Python's own library.

    It is of the thread that runs the tasks, or of autograd's thread with our hooks if the former waits for it.
    """
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if "hread" in line and line.endswith("(most recent call first):"):
            threads.append([])
        elif (found := _FRAME.match(line)) and threads:
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    main = [thread for thread in threads if any(_is(frame, "worker.py", "work") for frame in thread)]
    hooks = [thread for thread in threads if thread not in main and not _follows(thread) and _own(thread)]
    hooks = [thread for thread in hooks if any("/fsdp2/" in frame.file for frame in thread)]
    waits_for_autograd = bool(main and main[0][:1] and "/torch/autograd/" in main[0][0].file)
    for thread in (*(hooks if waits_for_autograd else ()), *main, *hooks):
        if own := _own(thread):
            return own[0]
    return None


def _is(frame: Frame, file: str, function: str) -> bool:
    return frame.file.endswith(f"/fsdp2/tools/check/{file}") and frame.function == function


def _follows(thread: Sequence[Frame]) -> bool:
    """Return True for the thread that waits for the end of the supervisor."""
    return any(_is(frame, "worker.py", "follow") for frame in thread)


def _own(thread: Sequence[Frame]) -> list[Frame]:
    library = sysconfig.get_paths()["stdlib"]
    # On a CPU a rank that waits looks at the others now and then, which is a part of its wait.
    wait = next((i for i, frame in enumerate(thread) if frame.file.endswith("/fsdp2/comm/host_work.py")), 0)
    own = [f for f in thread[wait:] if "site-packages" in f.file or not f.file.startswith((library, "<"))]
    return [frame for frame in own if not any(part in frame.file for part in _PASSED)] or own


def hanging(ranks: Sequence[Stuck]) -> list[Stuck]:
    """Return the ranks that block the others, or none if all wait for each other in the same place."""
    apart = [rank for rank in ranks if not rank.waits]
    if apart and len(apart) < len(ranks):
        return apart
    places = Counter(str(rank.frame) for rank in ranks)
    if len(places) > 1:  # on a GPU a rank waits only where it needs a value, so the different one is guilty
        most = places.most_common(1)[0]
        if most[1] > 1:
            return [rank for rank in ranks if str(rank.frame) != most[0]]
    steps = Counter(rank.doing for rank in ranks)
    if len(steps) > 1 and steps.most_common(1)[0][1] > 1:
        return [rank for rank in ranks if rank.doing != steps.most_common(1)[0][0]]
    return list(ranks) if len(ranks) == 1 else []


def describe(ranks: Sequence[Stuck], seconds: float) -> str:
    """Return the text for the report about ranks without progress for ``seconds``."""
    guilty = hanging(ranks)
    others = [rank for rank in ranks if rank not in guilty]
    lines = [f"{rank} hangs" if i == 0 else f"{rank} too" for i, rank in enumerate(guilty)]
    if not guilty:
        lines = ["all ranks wait for each other: they take part in different collectives, or the network is down"]
    if others:
        lines.append("waiting: " + "; ".join(map(str, others[:8])) + ("; ..." if len(others) > 8 else ""))
    return f"there was no progress for {seconds:.0f} s. " + ". ".join(lines)
