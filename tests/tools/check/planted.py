"""``python -m fsdp2 check`` with defects put in: python planted.py TASK=DEFECT,... ARGUMENT ...

Workers are spawned, so they import this file again and have the defects too.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fsdp2
from fsdp2.__main__ import main
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.tasks import TASKS

Change = Callable[[Any, Place], object]


@contextmanager
def every_unit(change: Change, place: Place) -> Iterator[None]:
    """Call ``change`` on each module that fsdp2 shards, and not on those of torch's own fully_shard."""
    fully_shard = fsdp2.fully_shard

    def changed(module: Any, **options: Any) -> Any:
        made = fully_shard(module, **options)
        change(module, place)
        return made

    fsdp2.fully_shard = changed
    try:
        yield
    finally:
        fsdp2.fully_shard = fully_shard


def wrong_gradient(unit: Any, place: Place) -> None:
    """Gradients are a thousandth too small."""
    unit.set_gradient_divide_factor(place.world * 1.001)


def lost_gradient(unit: Any, place: Place) -> None:
    """No gradient reaches what comes before a block, or the block itself."""
    if not hasattr(unit, "blocks"):
        unit.register_forward_hook(lambda module, arguments, output: output.detach().requires_grad_())


def kept_memory(unit: Any, place: Place) -> None:
    """Every forward keeps a copy of its output."""
    kept: list[torch.Tensor] = []
    unit.register_forward_hook(lambda module, arguments, output: kept.append(output.detach().clone()))


def used_again(unit: Any, place: Place) -> None:
    """A forward reads memory that was freed and given out again: as a rule the old values are still there."""

    def read(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        stale = torch.ones_like(output)
        storage = stale.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        return output + 0 * stale.nan_to_num(nan=torch.nan, posinf=0, neginf=0)

    unit.register_forward_hook(read)


def in_second_step(act: Callable[[], object]) -> Change:
    """Return a change that lets the last rank ``act`` in its second forward."""

    def change(unit: Any, place: Place) -> None:
        calls: list[None] = []

        def count(module: Any, arguments: Any) -> None:
            calls.append(None)
            if len(calls) == 2 and place.rank == place.world - 1:
                act()

        unit.register_forward_pre_hook(count)

    return change


def wait_for_nothing() -> None:
    """Hang."""
    threading.Event().wait()


def die() -> None:
    """Crash."""
    os.kill(os.getpid(), signal.SIGSEGV)


def trouble() -> None:
    """Raise."""
    raise RuntimeError("trouble on purpose")


DEFECTS: dict[str, Change] = {
    "wrong_gradient": wrong_gradient,
    "lost_gradient": lost_gradient,
    "kept_memory": kept_memory,
    "used_again": used_again,
    "hang": in_second_step(wait_for_nothing),
    "crash": in_second_step(die),
    "raise": in_second_step(trouble),
}


def plant(task: str, defect: str) -> None:
    """Let a task run with a defect."""
    run = TASKS[task].run

    def with_defect(place: Place) -> Outcome:
        with every_unit(DEFECTS[defect], place):
            return run(place)

    TASKS[task] = dataclasses.replace(TASKS[task], run=with_defect)


if __name__ in ("__main__", "__mp_main__"):  # the second is what it is called in a worker
    for pair in sys.argv[1].split(","):
        plant(*pair.split("="))
if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[2:]]))
