"""Work that is late on a GPU: what does not wait for it computes with other values than it should.

    with delays(7):
        ...  # kernels that only take time, put at random before work of lanes and before layers

A small model's kernels are over before the next one is launched, so a wait that is missing would show in no result.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from fsdp2.comm.streams import ComputeLane, Done, Lane

CYCLES = 2_000_000
"""About a millisecond."""
OFTEN = 0.2


@contextlib.contextmanager
def delays(seed: int, *, layers: bool = True) -> Iterator[None]:
    """Delay work on every stream at random inside the block; before ``layers`` too, where none is compiled."""
    chance = random.Random(seed)

    def delay(stream: Any) -> None:
        if stream is not None and chance.random() < OFTEN:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(CYCLES * chance.random()))

    def lane_after(original: Callable[..., Done]) -> Callable[..., Done]:
        @wraps(original)
        def after(self: Lane, *arguments: Any) -> Done:
            done = original(self, *arguments)
            delay(self._stream)
            return done

        return after

    def compute_here(original: Callable[..., Done]) -> Callable[..., Done]:
        @wraps(original)
        def here(self: ComputeLane) -> Done:
            delay(self._backward or torch.cuda.current_stream())
            return original(self)

        return here

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Lane, "after", lane_after(Lane.after)))
        stack.enter_context(mock.patch.object(ComputeLane, "here", compute_here(ComputeLane.here)))
        if layers:
            hook = register_module_forward_pre_hook(lambda *unused: delay(torch.cuda.current_stream()))
            stack.callback(hook.remove)
        yield
