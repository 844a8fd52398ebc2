"""torch's stream sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StreamError", "stream_sanitizer"]


class StreamError(Exception):
    """A kernel does not wait for another stream that uses the same memory."""


@contextmanager
def stream_sanitizer() -> Iterator[None]:
    """Raise ``StreamError`` if a kernel in the block does not wait for another stream that uses the same memory.

    It uses the dispatch mode itself, because ``enable_cuda_sanitizer`` is for a whole program. Importing the mode makes
    torch report each allocation and event until the process ends, so it is imported here and not with the package.
    """
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors

    try:
        with CUDASanitizerDispatchMode():
            yield
    except CUDASanitizerErrors as error:
        raise StreamError(str(error)) from error
