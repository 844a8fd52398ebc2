"""The current stream of a device, asked for without making an object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["current_key"]


def current_key(device: torch.device) -> Callable[[], Any] | None:
    """Return a function whose result says which stream of ``device`` is the current one; None if torch has none.

    ``torch.cuda.current_stream`` makes a new object, with a dozen Python calls, each time. A step asks for every
    gradient.
    """
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type != "cuda" or raw is None:
        return None
    if device.index is None:
        return lambda: raw(torch.cuda.current_device())
    return partial(raw, device.index)
