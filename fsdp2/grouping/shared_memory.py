"""Parameters that were several in the same memory: a step on one was a step on the other, until both were sharded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fsdp2._warn import warn
from fsdp2.engine.param import FSDPParam

__all__ = ["note_memory", "warn_of_shared_memory"]

# By where the elements of the original were.
_first: weakref.WeakValueDictionary[Any, FSDPParam] = weakref.WeakValueDictionary()
# Pairs of one memory that no call has warned of: their units may be in different trees until the call on the root.
_pairs: dict[tuple[weakref.ref[FSDPParam], weakref.ref[FSDPParam]], None] = {}


def note_memory(param: FSDPParam, memory: Any) -> None:
    """Note where the elements of the original of ``param`` were, as ``memory_of`` tells it; None if that is unknown."""
    if memory is None:
        return
    other = _first.setdefault(memory, param)
    if other is not param:
        _pairs[weakref.ref(other), weakref.ref(param)] = None


def warn_of_shared_memory(modules: Iterable[nn.Module]) -> None:
    """Warn of parameters below ``modules`` that were several in the same memory; call it last.

    Such are two that ``load_state_dict(assign=True)`` makes of a tied one, or ``head.weight.data = embed.weight.data``.
    They are not tied here: where a model is moved to a GPU first, each has memory of its own, and trains alone.
    """
    if not _pairs:  # as for almost all models: a walk in the call on each of thousands of layers takes long
        return
    names = {module: name for root in modules for name, module in root.named_modules()}
    found = []
    for pair in list(_pairs):
        one, two = (reference() for reference in pair)
        if one is None or two is None:
            _pairs.pop(pair, None)  # another thread may have taken it
        elif (one.requires_grad or two.requires_grad) and _is_below(one, names) and _is_below(two, names):
            _pairs.pop(pair, None)
            found.append((_below(one, names), _below(two, names)))
    if found:
        (one_name, two_name), more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warn(
            f"fully_shard: {one_name} and {two_name}{more}: got two parameters in the same memory, so that a step on "
            "one changed the other, expected one parameter or two memories; each has a shard of its own now, and they "
            "train apart. load_state_dict(assign=True) makes two of a tied one. Tie them before fully_shard: "
            f"model.{two_name} = model.{one_name}. If they are to train apart, give one a copy: "
            "nn.Parameter(weight.detach().clone())"
        )


def _is_below(param: FSDPParam, names: Mapping[nn.Module, str]) -> bool:
    return any(site.module in names for site in param.sites)


def _below(param: FSDPParam, names: Mapping[nn.Module, str]) -> str:
    """Return the name of ``param`` in the modules that have these ``names``."""
    site = next(site for site in param.sites if site.module in names)
    return f"{names[site.module]}.{site.name}" if names[site.module] else site.name
