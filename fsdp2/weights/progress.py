"""How far a load or save is: nothing by default, a bar, or a function of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Progress", "showing"]

Progress = bool | Callable[[int, int], None]
"""True for a bar of tqdm's, or a function of the bytes that are through and those that there are."""


@contextlib.contextmanager
def showing(progress: Progress, what: str, total: int, *, here: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes that have just moved; it does something only ``here``, on the first rank.

    Raises:
        TypeError: ``progress`` is neither True, False nor a function.
        ImportError: a bar needs the package tqdm.
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
        report, through = progress, 0

        def moved(nbytes: int) -> None:
            nonlocal through
            through += nbytes
            report(through, total)

        yield moved
