"""What the host does in a step: calls of functions, Python's and C's, by this thread and by autograd's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["calls_of"]


def calls_of(step: Callable[[], object]) -> Counter[str]:
    """Return how often a step calls each function, by name."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    _on_autograds_thread(lambda: sys.setprofile(note))
    calls.clear()
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    found = Counter(calls)
    _on_autograds_thread(lambda: sys.setprofile(None))
    return found


def _on_autograds_thread(act: Callable[[], object]) -> None:
    tensor = torch.zeros(1, device="cuda", requires_grad=True) * 1
    tensor.register_hook(lambda gradient: act())
    tensor.backward()
