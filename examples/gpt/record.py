"""The records of a training job, which are saved in its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpt.options import Settings


@dataclass
class Run:
    """The measurements of one run, on one number of processes. Memory is that of the rank that used most."""

    ranks: int
    backend: str
    first_step: int
    compute: str = "bfloat16"
    parameters: int = 0
    parameters_per_rank: int = 0
    peak_bytes: int = 0
    peak_bytes_unsharded: int = 0
    tokens_per_second: float = 0.0
    losses: list[float] = field(default_factory=list)  # per step: the mean of the global batch, in nats per byte
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)

    @property
    def last_step(self) -> int:
        """The number of steps of the whole job that are done after this run."""
        return self.first_step + len(self.losses)


@dataclass
class Progress:
    """The job so far: its settings, its text (None for the built-in one), and all runs. The last may be in progress."""

    settings: Settings
    text: str | None
    text_digest: str
    runs: list[Run] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of steps done so far."""
        return self.runs[-1].last_step if self.runs else 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain dicts, lists, strings and numbers."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        """Return the Progress from the result of `to_json`; raise KeyError or TypeError for other data."""
        runs = [Run(**{**run, "held_out": [tuple(pair) for pair in run["held_out"]]}) for run in data["runs"]]
        return Progress(Settings(**data["settings"]), data["text"], data["text_digest"], runs)
