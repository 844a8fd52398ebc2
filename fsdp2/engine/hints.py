"""Explain torch's errors about shards that were used as if they were full parameters: which parameter, what to do.

DTensor raises it before any Python code of ours could run, so it is explained afterwards: when it leaves the forward of
a root or a registered method, and in the log when the process ends with it.
"""

from __future__ import annotations

import atexit
import itertools
import linecache
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import nn, optim

from fsdp2._torch.tensors import versions_of
from fsdp2.engine.param import FSDPParam

__all__ = ["Groups", "explain", "explain_at_exit"]

logger = logging.getLogger("fsdp2")

_TEXT = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "use it inside `with fsdp2.use_weights(module):`, where module is the one that has the parameter, or call that "
    "module instead"
)
_PLACEMENT = "Sharding propagation failed", "does not have a sharding strategy registered"  # torch 2.13, and 2.11
_STEP = (
    "build it as fsdp2.use_full_params({0}(...)), which runs the step on full parameters, or as "
    "fsdp2.use_local_shards({0}(...)) if it updates each element alone"
)
_STORAGE = "access the data pointer on an invalid python storage"
_GONE = re.compile(r"is at version (\d+); expected version")
_WRITTEN = (
    "DTensors have no memory of their own to be written to a file: got a state dict of shards, expected whole tensors; "
    "on every rank, save inside `with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):`, or call "
    "fsdp2.save_safetensors"
)
_SHOWN = 8
_registered = False

Groups = Callable[[], Iterable[Any]]
"""The groups whose shards an error may be about."""


def _shown(groups: Groups) -> dict[FSDPParam, str]:
    """Return the parameters that modules show shards of at the moment, each with the name of its unit.

    Before the first forward that is the module's class: a name counts from the root, which nobody knows then.
    """
    params = {p: _unit(group) for group in groups() for p in group.params}
    return {p: name for p, name in params.items() if p.sites[0].shown is p.sharded}


def _about_gone(version: int, groups: Groups) -> str | None:
    """Return which full parameter backward needed when its memory was gone; None if the ``version`` is none of ours."""
    for group in groups():
        for param in group.params:
            if param.full is not None and versions_of([param.full]) == [version]:
                return (
                    f"{param.name} (unit {_unit(group)}): got a backward through it while it is sharded, expected that "
                    "backward enters the unit by what its forward returned, wrote to its arguments or left on its "
                    "modules; return the tensor by which it entered, or keep the unit in memory: "
                    "set_reshard_after_forward(False) and set_reshard_after_backward(False)"
                )
    return None


def _unit(group: Any) -> str:
    return repr(group.name or "the root") if group.name or group.in_root else type(group.modules[0]).__name__


def _hint(error: BaseException | None, groups: Groups) -> str | None:
    """Return what ``error`` is about and what to do; None if it is not about the use of shards."""
    if not isinstance(error, RuntimeError) or error.__traceback__ is None:
        return None
    text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if _STORAGE in text and _shown(groups):
        return _WRITTEN
    if (found := _GONE.search(text)) is not None:
        return _about_gone(int(found[1]), groups)
    if _TEXT not in text and not any(placement in text for placement in _PLACEMENT):
        return None
    units = _shown(groups)
    frames = list(_frames(error.__traceback__))
    if (optimizer := _stepping(frames)) is not None and _holds(optimizer, units):
        name = type(optimizer).__name__
        return f"{name}: its step got shards, and computes as if they were full parameters; {_STEP.format(name)}"
    if _TEXT not in text:
        return None
    used, named = _used(frames[-1], units)
    if not used:
        return None
    names = ", ".join(f"{p.name} (unit {units[p]})" for p in used[:_SHOWN])
    names = f"{'' if named else 'possibly '}{names}{', ...' if len(used) > _SHOWN else ''}"
    return f"{names}: got a shard, expected the full parameter, which exists in its unit's forward; {_REMEDY}"


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _stepping(frames: Iterable[TracebackType]) -> optim.Optimizer | None:
    """Return the optimizer whose step failed in its own source; None if another module's code failed (a closure's)."""
    found, source = None, None
    for one in frames:
        if isinstance(stepping := one.tb_frame.f_locals.get("self"), optim.Optimizer):
            found = stepping
        name = one.tb_frame.f_globals.get("__name__", "")
        if not name.startswith("torch.distributed.tensor"):  # DTensor's dispatcher, which the failing line called
            source = name
    return found if found is not None and type(found).__module__ == source else None


def _holds(optimizer: optim.Optimizer, params: Iterable[FSDPParam]) -> bool:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param.sharded) in held for param in params)


def _used(trace: TracebackType, params: Iterable[FSDPParam]) -> tuple[list[FSDPParam], bool]:
    """Return those of ``params`` that the failing lines name, else that their function names, and whether named."""
    frame, code = trace.tb_frame, trace.tb_frame.f_code
    text = _lines(trace)
    meant = {id(_follow(path, frame.f_locals)) for path in re.findall(r"\w+(?:\.\w+)*", text)}
    used = [p for p in params if id(p.sharded) in meant]
    if used:
        return used, True
    for words, named in (({*re.findall(r"\w+", text)}, True), ({*code.co_names, *code.co_varnames}, False)):
        values = {id(value) for name, value in frame.f_locals.items() if name in words}
        used = [p for p in params if id(p.sharded) in values or {*p.name.split(".")[-2:]} <= words]
        if used:
            return used, named
    return [], False


def _follow(path: str, values: Mapping[str, object]) -> object:
    """Return what a path like ``self.head.weight`` leads to. Only modules are followed: other attributes run code."""
    first, *rest = path.split(".")
    value = values.get(first)
    for name in rest:
        if not isinstance(value, nn.Module):
            return None
        value = value._parameters.get(name, value._modules.get(name))
    return value


def _lines(trace: TracebackType) -> str:
    """Return the failing expression's lines."""
    first = last = trace.tb_lineno
    if sys.version_info >= (3, 11):
        _, last_known, _, _ = next(itertools.islice(trace.tb_frame.f_code.co_positions(), trace.tb_lasti // 2, None))
        last = last_known or first
    return "".join(linecache.getline(trace.tb_frame.f_code.co_filename, number) for number in range(first, last + 1))


def explain(error: BaseException | None, groups: Groups) -> None:
    """Add to the text of ``error`` what it is about, once."""
    text = _hint(error, groups)
    if error is not None and text is not None and text not in str(error):
        error.args = (f"{error}\n{text}", *error.args[1:])


def explain_at_exit(groups: Groups) -> None:
    """Log the explanation when the process ends with such an error; ``groups`` returns those of all models."""
    global _registered
    if _registered:
        return
    _registered = True
    atexit.register(_at_exit, groups)


def _at_exit(groups: Groups) -> None:
    error = getattr(sys, "last_value", None)
    text = _hint(error, groups)
    if text is not None and text not in str(error):
        logger.error("%s", text)
