"""What runs inside a transform of ``torch.func``: tensors that are made there must not be the transform's."""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_jvp(function: Callable[[], object]) -> None:
    """Call ``function`` inside a transform."""
    ones = torch.ones(2)
    torch.func.jvp(lambda x: (function(), x)[1], (ones,), (ones,))
