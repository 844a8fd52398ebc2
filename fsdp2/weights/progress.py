"""Report the progress of a load or save: by default not at all, or with a bar, or to the caller's function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Progress", "showing"]

Progress = bool | Callable[[int, int], None]
"""True for a tqdm bar, or a function that takes the bytes done and the bytes in total."""


@contextlib.contextmanager
def showing(progress: Progress, what: str, total: int, *, here: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes just moved. It reports only where ``here``, on the first rank.

    Raises:
        TypeError: ``progress`` is neither True, False nor a function.
        ImportError: The package tqdm, which a bar needs, is not installed.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"{what}: progress must be True, False or a function of (bytes, total), got {progress!r}")
    if progress is False or not here:
        yield lambda nbytes: None
    elif progress is True:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                f"{what}: progress=True shows a bar of the package tqdm, which is not installed; pip install tqdm, or "
                "pass a function of (bytes, total)"
            ) from error
        with tqdm(total=total, desc=what, unit="B", unit_scale=True) as bar:
            yield bar.update
    else:
        report, done = progress, 0

        def moved(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(done, total)

        yield moved
