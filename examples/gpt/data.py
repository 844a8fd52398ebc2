"""Load a text as bytes, and select the bytes for a step, a rank or an evaluation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]

import torch
from torch import Tensor

from gpt.processes import Place, UserError

Batch = tuple[Tensor, Tensor]  # inputs and targets, both int64 [rows, context]; a target is the byte that follows

BUILT_IN = "the Python manual (pydoc_data.topics)"
HELD_OUT = 10  # the last 1/HELD_OUT of the text is never trained on


@dataclass(frozen=True)
class Text:
    """A text in two parts, for training and for evaluation, both uint8 [bytes]. The built-in text has no `path`."""

    path: str | None
    digest: str
    train: Tensor
    held_out: Tensor

    @property
    def name(self) -> str:
        """The name to show: the path, or that of the built-in text."""
        return self.path or BUILT_IN


def load_text(path: Path | None, context: int) -> Text:
    """Return the text at `path`, by default a text in Python's library; raise a UserError if it is unusable."""
    raw = _built_in() if path is None else _read(path)
    shortest = HELD_OUT * (context + 1)
    if len(raw) < shortest:
        what = "is empty" if not raw else f"has only {len(raw):,} bytes"
        raise UserError(
            f"the text {path or BUILT_IN} {what}; windows of {context} bytes need a text of {shortest:,} bytes or more"
        )
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    cut = len(data) - len(data) // HELD_OUT
    return Text(None if path is None else str(path.resolve()), hashlib.sha256(raw).hexdigest(), data[:cut], data[cut:])


def training_batch(text: Text, step: int, rows: int, context: int, seed: int, place: Place) -> Batch:
    """Return this rank's rows of the global batch of `step`.

    The global batch depends only on `seed` and `step`. So any number of ranks reads the same bytes in the same order,
    and a resumed run continues where the first one stopped.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - context, (rows,), generator=generator)
    each = rows // place.ranks
    return _windows(text.train, starts[place.rank * each :][:each], context, place)


def held_out_batches(text: Text, context: int, place: Place, windows: int = 32, rows: int = 4) -> list[Batch]:
    """Return evenly spaced windows of the held-out part in batches of `rows`, the same on every rank in every run."""
    last = len(text.held_out) - context - 1
    starts = torch.linspace(0, last, min(windows, last + 1)).long()
    return [_windows(text.held_out, some, context, place) for some in starts.split(rows)]


def printable(data: bytes) -> str:
    """Return `data` as text that is safe to print on a terminal, with a dot for each unprintable character."""
    text = data.decode("utf-8", errors="replace").replace("\ufffd", "·")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def _windows(data: Tensor, starts: Tensor, context: int, place: Place) -> Batch:
    windows = data[starts[:, None] + torch.arange(context + 1)].long().to(place.device)
    return windows[:, :-1], windows[:, 1:]


def _built_in() -> bytes:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the text {path}: {error.strerror or error}") from error
