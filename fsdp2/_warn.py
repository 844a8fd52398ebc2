"""Warnings that point to a line of the user."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from types import FrameType

import torch

__all__ = ["warn"]

_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


def warn(text: str, *, here: bool = True) -> None:
    """Warn of ``text`` at the line of the user's code, or of another library, that led here.

    A warning shows the line that it points to, and one of fsdp2 or torch tells the user nothing. If it is to be shown
    on one rank alone, the others call this as well, not ``here``: where warnings are errors, all raise it, and none
    goes on to a collective in which it would wait for the one that raised.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    with nullcontext() if here else warnings.catch_warnings(record=True):  # an error is raised all the same
        warnings.warn(text, stacklevel=2 if frame is None else level)
