"""Text as bytes: where it comes from, and which piece of it a given step, rank or evaluation sees."""

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
HELD_OUT = 10  # one byte in so many, at the end of the text, is never trained on


@dataclass(frozen=True)
class Text:
    """A text in two parts, to train on and held out, both uint8 [bytes]; a `path` of None is the built-in text."""

    path: str | None
    digest: str
    train: Tensor
    held_out: Tensor

    @property
    def name(self) -> str:
        """What to call it."""
        return self.path or BUILT_IN


def load_text(path: Path | None, context: int) -> Text:
    """The text at `path`, or the one every Python carries; UserError if it cannot be read or is too short."""
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
    """This rank's rows of the global batch of `step`.

    The global batch depends on `seed` and `step` alone, so the same bytes are seen in the same order on any number of
    ranks, and a resumed run goes on where the first one stopped.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - context, (rows,), generator=generator)
    each = rows // place.ranks
    return _windows(text.train, starts[place.rank * each :][:each], context, place)


def held_out_batches(text: Text, context: int, place: Place, windows: int = 32, rows: int = 4) -> list[Batch]:
    """Evenly spaced windows of the held-out part in batches of `rows`: the same on every rank of every run."""
    last = len(text.held_out) - context - 1
    starts = torch.linspace(0, last, min(windows, last + 1)).long()
    return [_windows(text.held_out, some, context, place) for some in starts.split(rows)]


def printable(data: bytes) -> str:
    """`data` as text that is safe to show on a terminal; what is not printable becomes a dot."""
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
