"""A rank of the job for tasks, and the result of a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BAD", "Comparison", "Outcome", "Place", "worst"]

BAD = ("hangs", "died", "failed", "wrong")
"""Verdicts that make the exit status 1, the worst first."""
_ORDER = (*BAD, "right", "seen", "skipped", "not run")


@dataclass(frozen=True)
class Comparison:
    """The largest difference between two runs and its bound; with ``exact`` the runs must have the same bits."""

    against: str
    what: str
    difference: float
    bound: float
    exact: bool
    same_bits: bool

    @property
    def right(self) -> bool:
        """True if the difference is allowed. NaN never is."""
        return self.same_bits or (not self.exact and self.difference <= self.bound)


@dataclass
class Outcome:
    """The result of a task on one rank.

    ``verdict`` is "right", "wrong", "failed" (an exception), "hangs", "died", "skipped", "not run" or "seen" (a
    measurement, which is not judged).
    """

    verdict: str
    text: str = ""
    comparisons: list[Comparison] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the values for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """Return the outcome from the values of ``to_json``."""
        comparisons = [Comparison(**comparison) for comparison in values["comparisons"]]
        return cls(**{**values, "comparisons": comparisons})


@dataclass
class Place:
    """One rank of the job, with its options and the figures of earlier tasks.

    Tasks call ``doing`` with a description at every step, because a rank without progress counts as hanging. ``store``
    belongs to this start of the workers.
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
        """True if the rank has a GPU."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.cuda:
            torch.cuda.synchronize()

    def from_rank0(self, name: str, make: Callable[[], str]) -> str:
        """Return the result of ``make`` on rank 0."""
        if self.rank == 0:
            self.store.set(name, make())
        return self.store.get(name).decode()

    def meet(self, name: str) -> None:
        """Wait until every rank has called this with the same ``name``, which may be used once."""
        if self.store.add(f"{name}/count", 1) == self.world:
            self.store.set(f"{name}/all", "1")
        self.store.get(f"{name}/all")


def worst(verdicts: list[str]) -> str:
    """Return the worst verdict of the ranks, or "not run" if there is none."""
    return min(verdicts, key=_ORDER.index, default="not run")
