"""Saving: what ``state_dict`` returns for the modules that a setting was made for."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import StateDictSettings
from torch.distributed.tensor import DTensor

from fsdp2.engine.index import groups_below, managed_slots
from fsdp2.engine.param import Slot
from fsdp2.engine.unit import live_states
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Managed, ranks_of
from fsdp2.weights.state_dict.convert import Converter, Item

__all__ = ["Saver", "forget_running_call"]


@dataclass
class _Found:
    """A value that a module put into the state dict for a managed parameter, and who says what becomes of it."""

    value: Any
    managed: Managed
    saver: Saver


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


class Saver:
    """One setting, as hooks on a module and on every module below it.

    Modules save what they show: DTensor shards. When the outermost of them is through, the values are converted in
    the order of their keys, which is the same on every rank.
    """

    def __init__(self, settings: StateDictSettings | None) -> None:
        self.settings = settings

    def __deepcopy__(self, memo: dict[int, Any]) -> Saver:
        """Copies of modules start without a setting."""
        return Saver(None)

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Note that ``state_dict`` has come to ``module``."""
        if self.settings is None:
            return
        call = _running.call
        if call is not None:
            call.leave_to(module, prefix)
        if call is None or not call.inside:
            call = _running.call = _Call(managed_slots(live_states()), _called_by_checkpointing())
        call.inside.append((weakref.ref(module), prefix))

    def after_save(self, module: nn.Module, destination: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Note what ``module`` saved; behind the outermost module convert everything."""
        call = _running.call
        if self.settings is None or call is None:
            return
        for name in module._parameters:
            managed, value = call.slots.get(Slot(module, name)), destination.get(prefix + name)
            if managed is not None and isinstance(value, DTensor):
                call.found[id(value)] = _Found(value, managed, self)
        while call.inside:
            reference, at = call.inside.pop()
            if reference() is module and at == prefix:
                break
        if not call.inside:
            _running.call = None
            if not call.skipped:
                self._convert(module, call, destination, prefix)

    def _convert(self, module: nn.Module, call: _Call, destination: dict[str, Any], prefix: str) -> None:
        """Make of everything that was saved what the setting of its module asks for, one setting after the other."""
        groups, ranks = groups_below(module), ranks_of(module, managed=True) or Ranks.world()
        keys = [key for key in destination if key.startswith(prefix)]
        by_saver: dict[Saver, dict[str, Item]] = {self: {}}
        for key in keys:
            value = destination.pop(key)
            found = call.found.get(id(value))
            saver, managed = (self, None) if found is None else (found.saver, found.managed)
            by_saver.setdefault(saver, {})[key] = Item(value, key, managed, managed is not None)
        converted: dict[str, Any] = {}
        keeps = True
        for saver, items in by_saver.items():
            assert saver.settings is not None
            convert = Converter(saver.settings.state_dict_type, saver.settings.state_dict_config, groups, ranks)
            values = zip(items, convert(list(items.values())))
            keeps = keeps and (convert.keeps or saver is not self)
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
