"""Inputs that no hook can be put on, because they are inside plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fsdp2.autograd.reach import Targets, is_made_since
from fsdp2.autograd.trees import find_tensors

__all__ = ["Gate", "HiddenInputs"]


class Gate:
    """Calls ``done`` when it is called itself, but only while it is open.

    It is closed at first: gradients of hidden inputs may still be missing when those of the other inputs are there.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self.is_open = False
        self._done = done

    def __call__(self) -> None:
        """Call ``done`` if the gate is open."""
        if self.is_open:
            self._done()


class HiddenInputs:
    """Inputs inside plain objects, such as the cache in which transformers' layers leave keys and values.

    Most layers use none of what earlier ones left there. Then backward needs the unit no more when it has the gradients
    of the other inputs; otherwise the unit would stay in memory until the end of backward.
    """

    def __init__(self, gate: Gate, hidden: Iterable[torch.Tensor], arguments: Any, since: int) -> None:
        """``hidden`` inputs are in ``arguments``. The forward makes nodes from the number ``since`` on."""
        self._gate = gate
        self._since = since
        self._arguments = arguments
        self._targets = Targets(hidden)

    def open_if_unused(self, output: Any) -> None:
        """Let the hooks on the other inputs count, unless the forward computed ``output`` with a hidden one.

        It may also have left results in the objects.
        """
        results = [*find_tensors(output), *find_tensors(self._arguments)]
        new = [tensor for tensor in results if is_made_since(tensor.grad_fn, self._since)]
        self._gate.is_open = not self._targets.reached_from(new, self._since)
