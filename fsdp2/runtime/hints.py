"""A word on shards that were computed with: torch's error says that tensors were mixed, not which and what to do.

DTensor raises it before any Python code of ours could run, so it is explained afterwards: when it leaves the forward of
a root, and when the process ends with it.
"""

from __future__ import annotations

import atexit
import linecache
import logging
import re
import sys
from collections.abc import Callable, Iterable
from types import TracebackType

from fsdp2.runtime.param import FSDPParam

__all__ = ["Shards", "explain", "explain_at_exit"]

logger = logging.getLogger("fsdp2")

_TEXT = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "use it inside `with fsdp2.use_weights(module):`, where module is the one that has the parameter, or call that "
    "module instead"
)
_SHOWN = 8
_registered = False

Shards = Callable[[], dict[FSDPParam, str]]
"""The parameters that modules show shards of at the moment, each with the name of its unit."""


def _hint(error: BaseException | None, shards: Shards) -> str | None:
    """Which parameters ``error`` is about and what to do; None if it is not about shards that were computed with."""
    if not isinstance(error, RuntimeError) or _TEXT not in str(error) or error.__traceback__ is None:
        return None
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    units = shards()
    used = _used(place, units)
    if not used:
        return None
    names = ", ".join(f"{p.name} (unit {units[p] or 'the root'!r})" for p in used[:_SHOWN])
    more = ", ..." if len(used) > _SHOWN else ""
    return f"{names}{more}: got a shard, expected the full parameter, which exists in its unit's forward; {_REMEDY}"


def _used(place: TracebackType, params: Iterable[FSDPParam]) -> list[FSDPParam]:
    """Those of ``params`` that the failing line names or, if there is none, that its function names or holds."""
    frame, code = place.tb_frame, place.tb_frame.f_code
    line = set(re.findall(r"\w+", linecache.getline(code.co_filename, place.tb_lineno)))
    for words in (line, {*code.co_names, *code.co_varnames}):
        values = {id(value) for name, value in frame.f_locals.items() if name in words}
        used = [p for p in params if id(p.sharded) in values or {*p.name.split(".")[-2:]} <= words]
        if used:
            return used
    return []


def explain(error: BaseException | None, shards: Shards) -> None:
    """Add to the text of ``error`` what it is about, once."""
    text = _hint(error, shards)
    if error is not None and text is not None and text not in str(error):
        error.args = (f"{error}\n{text}", *error.args[1:])


def explain_at_exit(shards: Shards) -> None:
    """Log what such an error is about when the process ends with it; ``shards`` is asked then, of all models."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_at_exit, shards)


def _at_exit(shards: Shards) -> None:
    error = getattr(sys, "last_value", None)
    text = _hint(error, shards)
    if text is not None and text not in str(error):
        logger.error("%s", text)
