"""Saving: what ``state_dict`` returns for the modules that a setting was made for."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import StateDictSettings
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2.engine.index import groups_below, managed_slots
from fsdp2.engine.param import Slot
from fsdp2.engine.unit import live_states
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Managed, ranks_of
from fsdp2.weights.state_dict.convert import Converter, Item

__all__ = ["SETTING", "Setting", "after_save", "before_save", "forget_running_call"]


SETTING = "_fsdp2_state_dict_setting"
"""Where a module's own dictionary keeps its setting, so that both die together."""


class Setting:
    """The setting of one module, and the hooks that follow it."""

    def __init__(self, settings: StateDictSettings, outermost: bool) -> None:
        self.settings = settings
        self.outermost = outermost
        self.handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies of modules start without a setting."""


class _Found(NamedTuple):
    """A value that a module put into the state dict for a managed parameter, and what its setting makes of it."""

    value: Any
    managed: Managed
    settings: StateDictSettings


@dataclass
class _Call:
    """One call of ``state_dict``: the modules it is inside of, and what they have saved."""

    slots: dict[Slot, Managed]
    skipped: bool
    inside: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    found: dict[int, _Found] = field(default_factory=dict)

    def leave_to(self, module: nn.Module, prefix: str) -> None:
        """Forget modules that ``module`` is not below of: their call raised and never came to its end."""
        while self.inside:
            above, at = self.inside[-1][0](), self.inside[-1][1]
            if above is not None and len(prefix) > len(at) and prefix.startswith(at):
                try:
                    if above.get_submodule(prefix[len(at) : -1]) is module:
                        return
                except AttributeError:
                    pass
            self.inside.pop()


class _Running(threading.local):
    """The call of ``state_dict`` that runs in this thread."""

    call: _Call | None = None


_running = _Running()


# Modules save what they show: DTensor shards. When the outermost of those with a setting is through, the values are
# converted in the order of their keys, which is the same on every rank.


def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Note that ``state_dict`` has come to ``module``."""
    if module.__dict__.get(SETTING) is None:
        return
    call = _running.call
    if call is not None:
        call.leave_to(module, prefix)
    if call is None or not call.inside:
        call = _running.call = _Call(managed_slots(live_states()), _called_by_checkpointing())
    call.inside.append((weakref.ref(module), prefix))


def after_save(module: nn.Module, destination: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Note what ``module`` saved; behind the outermost module convert everything."""
    call, setting = _running.call, module.__dict__.get(SETTING)
    if setting is None or call is None:
        return
    for name in module._parameters:
        managed, value = call.slots.get(Slot(module, name)), destination.get(prefix + name)
        if managed is not None and isinstance(value, DTensor):
            call.found[id(value)] = _Found(value, managed, setting.settings)
    while call.inside:
        reference, at = call.inside.pop()
        if reference() is module and at == prefix:
            break
    if not call.inside:
        _running.call = None
        if not call.skipped:
            _convert(module, setting.settings, call, destination, prefix)


def _convert(module: nn.Module, own: StateDictSettings, call: _Call, destination: dict[str, Any], prefix: str) -> None:
    """Make of everything that was saved what the setting of its module asks for, one setting after the other."""
    groups, ranks = groups_below(module), ranks_of(module, managed=True) or Ranks.world()
    keys = [key for key in destination if key.startswith(prefix)]
    chosen: dict[int, tuple[StateDictSettings, dict[str, Item]]] = {id(own): (own, {})}
    for key in keys:
        value = destination.pop(key)
        found = call.found.get(id(value))
        settings, managed = (own, None) if found is None else (found.settings, found.managed)
        chosen.setdefault(id(settings), (settings, {}))[1][key] = Item(value, key, managed, managed is not None)
    converted: dict[str, Any] = {}
    keeps = True
    for settings, items in chosen.values():
        convert = Converter(settings.state_dict_type, settings.state_dict_config, groups, ranks)
        values = zip(items, convert(list(items.values())))
        keeps = keeps and (convert.keeps or settings is not own)
        converted.update(values if convert.keeps else ())
    for key in keys if keeps else ():
        if key in converted:
            destination[prefix + clean_name(key[len(prefix) :])] = converted[key]
    _clean_metadata(destination, prefix)


def _clean_metadata(destination: dict[str, Any], prefix: str) -> None:
    """Let the versions of modules, which torch keeps beside the values, be found by the names of the plain model."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        items = list(metadata.items())
        metadata.clear()
        metadata.update((prefix + clean_name(k[len(prefix) :]) if k.startswith(prefix) else k, v) for k, v in items)


def _called_by_checkpointing() -> bool:
    """Whether torch.distributed.checkpoint.state_dict called the ``state_dict`` that runs.

    Its functions expect shards, and make them full by options of their own; nothing but the stack tells who called.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "state_dict":
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    while frame is not None and frame.f_code.co_name == "state_dict":
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def forget_running_call() -> None:
    """Forget a ``state_dict`` of this thread that raised."""
    _running.call = None
