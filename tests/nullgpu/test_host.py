"""What the host does for a block on CUDA's code, less what the block does by itself, beside torch's own."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn

import fsdp2
from tests.nullgpu.calls import calls_of
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_bytes import Layer, model_of, step

KINDS = ("sharded", "hybrid", "offloaded")


@functools.cache
def calls_of_a_block(library: Any, kind: str = "sharded") -> Counter[str]:
    """Return the calls of Python that two more blocks make in a step, with a library or without one (None)."""
    names, shape = (("replicate", "shard"), (8, 8)) if kind == "hybrid" else ((), ())

    def of(layers: int) -> Counter[str]:
        with ranks(64, *names, shape=shape) as mesh:
            torch.set_default_device(None)  # else each function of torch is called twice
            if library is None:
                model: Any = nn.Sequential(*(Layer() for _ in range(layers))).bfloat16().cuda()
            elif kind == "offloaded":
                model = model_of(mesh, library, layers, offload_policy=library.CPUOffloadPolicy())
                model.to_empty(device="cpu")
            else:
                model = model_of(mesh, library, layers)
            for _ in range(3):
                step(model, 2048)
            gc.collect()
            gc.disable()
            try:
                return calls_of(lambda: step(model, 2048))
            finally:
                gc.enable()

    return of(6) - of(4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_of_torchs_calls(kind):
    """At most: it was half while lanes were entered with ``torch.cuda.stream``, which asks for devices each time."""
    alone = sum(calls_of_a_block(None).values())
    ours, theirs = (sum(calls_of_a_block(library, kind).values()) - alone for library in (fsdp2, torchs))
    assert 0 < 3 * ours <= theirs, f"{ours / 2} and {theirs / 2} calls a block"


@functools.cache
def calls_of_a_first_step(library: Any) -> int:
    """Return the calls of Python that two more units make while they are sharded and in their first step."""

    def of(layers: int) -> int:
        models: list[Any] = []
        with ranks(64) as mesh:
            torch.set_default_device(None)
            step(model_of(mesh, library, 1), 128)  # what is made once for the process
            gc.disable()
            try:
                sharding = calls_of(lambda: models.append(model_of(mesh, library, layers)))
                return sum(sharding.values()) + sum(calls_of(lambda: step(models[0], 128)).values())
            finally:
                gc.enable()

    return of(6) - of(4)


def test_fewer_calls_until_the_first_step_ends():
    """Plans, views and hooks of a unit are made in its first step, and cost less than what torch makes."""
    assert calls_of_a_first_step(fsdp2) < calls_of_a_first_step(torchs)


def test_no_context_and_no_current_stream_of_torch():
    """Each asks for devices: a lane's stream is a context itself, and the current one is known by its number."""
    ours = calls_of_a_block(fsdp2)
    assert ours["wait_event"] + ours["Stream.wait_event"] > 0
    assert not {"current_stream", "StreamContext.__init__", "set_stream"} & ours.keys()
