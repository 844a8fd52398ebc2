"""Generate text with the model, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp2 import FSDPModule
from gpt.model import GPT
from gpt.processes import Place


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, place: Place, temperature: float = 0.5, seed: int = 0) -> bytes:
    """Return `count` bytes that continue `prompt`, the same on every rank. Every rank must call this.

    All ranks use generators with the same seed, so they compute the same text without communicating it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=place.device)
    with _kept_whole(model):
        for _ in range(count):
            logits = model(tokens[:, -model.config.context :])[0, -1].float().cpu()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn[None].to(place.device)), dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())


@contextmanager
def _kept_whole(model: GPT) -> Iterator[None]:
    """Gather the model once for the block, instead of once for each byte."""
    if isinstance(model, FSDPModule):
        model.unshard(recurse=True)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.reshard(recurse=True)
