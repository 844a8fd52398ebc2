"""A rank of the job as a task sees it, and what a task says in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BAD", "Comparison", "Outcome", "Place", "worst"]

BAD = ("hangs", "died", "failed", "wrong")
"""Verdicts that make the exit status 1, the worst first."""
_ORDER = (*BAD, "look", "right", "seen", "skipped", "not run")


@dataclass(frozen=True)
class Comparison:
    """The largest difference between two runs, and how large it may be; ``exact``: they must have the same bits."""

    against: str
    what: str
    difference: float
    bound: float
    exact: bool
    same_bits: bool

    @property
    def right(self) -> bool:
        """Whether the difference is allowed; one that is not a number never is."""
        return self.same_bits or (not self.exact and self.difference <= self.bound)


@dataclass
class Outcome:
    """What a task found on one rank.

    ``verdict`` is "right", "wrong", "failed" (an exception), "hangs", "died", "skipped", "not run", "seen" (nothing was
    judged) or "look" (allowed, but worth a look).
    """

    verdict: str
    text: str = ""
    comparisons: list[Comparison] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """What ``to_json`` wrote."""
        comparisons = [Comparison(**comparison) for comparison in values["comparisons"]]
        return cls(**{**values, "comparisons": comparisons})


@dataclass
class Place:
    """One rank of the job, with its options and what earlier tasks found on it.

    ``doing`` says what the rank does now. A rank that says nothing for a while counts as hanging, so tasks call it at
    every step. ``store`` belongs to this start of the workers.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    store: dist.Store
    against_torch: bool = True
    hosts: int = 1
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    doing: Callable[[str], object] = lambda text: None

    @property
    def cuda(self) -> bool:
        """Whether the rank has a GPU."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()

    def from_rank0(self, name: str, make: Callable[[], str]) -> str:
        """Return what ``make`` returned on rank 0."""
        if self.rank == 0:
            self.store.set(name, make())
        return self.store.get(name).decode()

    def meet(self, name: str) -> None:
        """Wait until every rank has called this with the same ``name``, which is used once."""
        if self.store.add(f"{name}/count", 1) == self.world:
            self.store.set(f"{name}/all", "1")
        self.store.get(f"{name}/all")


def worst(verdicts: list[str]) -> str:
    """Return the verdict of a task from those of its ranks; "not run" where there are none."""
    return min(verdicts, key=_ORDER.index, default="not run")
