"""What a training job remembers about itself, in a form that goes into a checkpoint and comes back from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpt.options import Settings


@dataclass
class Run:
    """One stretch of training on one number of processes, as measured; memory is the most that any rank took."""

    ranks: int
    backend: str
    first_step: int
    compute: str = "bfloat16"
    parameters: int = 0
    parameters_per_rank: int = 0
    peak_bytes: int = 0
    peak_bytes_unsharded: int = 0
    tokens_per_second: float = 0.0
    losses: list[float] = field(default_factory=list)  # one a step, in nats a byte, mean of the global batch
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)

    @property
    def last_step(self) -> int:
        """Steps of the whole job that are done after this run."""
        return self.first_step + len(self.losses)


@dataclass
class Progress:
    """A job so far: its settings, its text (None: the built-in one), and every run, the one in progress last."""

    settings: Settings
    text: str | None
    text_digest: str
    runs: list[Run] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.runs[-1].last_step if self.runs else 0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        """The Progress that `to_json` described; KeyError or TypeError if `data` is something else."""
        runs = [Run(**{**run, "held_out": [tuple(pair) for pair in run["held_out"]]}) for run in data["runs"]]
        return Progress(Settings(**data["settings"]), data["text"], data["text_digest"], runs)
