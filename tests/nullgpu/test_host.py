"""What the host does for a block on CUDA's code, less what the block does by itself, beside torch's own."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from typing import Any

import torch
import torch.distributed.fsdp as torchs
from torch import nn

import fsdp2
from tests.nullgpu.calls import calls_of
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_bytes import Layer, model_of, step


@functools.cache
def calls_of_a_block(library: Any) -> Counter[str]:
    """Return the calls of Python that two more blocks make in a step, with a library or without one (None)."""

    def of(layers: int) -> Counter[str]:
        with ranks(64) as mesh:
            torch.set_default_device(None)  # else each function of torch is called twice
            blocks = nn.Sequential(*(Layer() for _ in range(layers))) if library is None else None
            model = model_of(mesh, library, layers) if blocks is None else blocks.bfloat16().cuda()
            for _ in range(3):
                step(model, 2048)
            gc.collect()
            gc.disable()
            try:
                return calls_of(lambda: step(model, 2048))
            finally:
                gc.enable()

    return of(6) - of(4)


def test_a_third_of_torchs_calls():
    """At most: it was half while lanes were entered with ``torch.cuda.stream``, which asks for devices each time."""
    ours, theirs = (
        sum(calls_of_a_block(library).values()) - sum(calls_of_a_block(None).values()) for library in (fsdp2, torchs)
    )
    assert 0 < 3 * ours <= theirs


def test_no_context_and_no_current_stream_of_torch():
    """Each asks for devices: a lane's stream is a context itself, and the current one is known by its number."""
    ours = calls_of_a_block(fsdp2)
    assert ours["wait_event"] + ours["Stream.wait_event"] > 0
    assert not {"current_stream", "StreamContext.__init__", "set_stream"} & ours.keys()
