"""Convert the result of ``state_dict`` for modules that have a setting."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import StateDictSettings
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2.engine.index import SiteFinder
from fsdp2.engine.param import FSDPParam, Site
from fsdp2.fsdp1.state_dict.convert import Item, convert
from fsdp2.weights.names import clean_name, clean_names

__all__ = ["SETTING", "Setting", "after_save"]

SETTING = "_fsdp2_state_dict_setting"
"""The key of the setting in a module's own dictionary, so that it is freed with the module."""


class Setting:
    """The setting of one module, and its hooks."""

    def __init__(self, settings: StateDictSettings, outermost: bool) -> None:
        self.settings = settings
        self.outermost = outermost
        self.handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: copies of modules have no setting."""


def after_save(module: nn.Module, destination: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Convert all saved values after the outermost module with a setting was saved.

    Modules save the DTensor shards that they show. The values are converted one setting after the other, in the order
    of their keys, which is the same on every rank.
    """
    own: Setting | None = module.__dict__.get(SETTING)
    if own is None or not _converts(module, destination):
        return
    params = _params_by_name(module, own)
    keys = [key for key in destination if key.startswith(prefix)]
    clean_names(keys, "state_dict: the module")
    unmanaged = (None, own.settings)
    chosen: dict[int, tuple[StateDictSettings, dict[str, Item]]] = {id(own.settings): (own.settings, {})}
    for key in keys:
        value, (param, settings) = destination.pop(key), params.get(clean_name(key[len(prefix) :]), unmanaged)
        if not isinstance(value, DTensor):  # summon_full_params shows a plain parameter
            param, settings = unmanaged
        chosen.setdefault(id(settings), (settings, {}))[1][key] = Item(value, key, param, param is not None)
    converted: dict[str, Any] = {}
    for settings, items in chosen.values():
        values = convert(list(items.values()), module, settings.state_dict_type, settings.state_dict_config)
        if values is not None:
            converted.update(zip(items, values))
        elif settings is own.settings:
            keys = []
    for key in keys:
        if key in converted:
            destination[prefix + clean_name(key[len(prefix) :])] = converted[key]
    _clean_metadata(destination, prefix)


def _converts(module: nn.Module, destination: dict[str, Any]) -> bool:
    """Return True if ``module`` is the outermost module with a setting in the call that fills ``destination``.

    Return False if torch.distributed.checkpoint.state_dict made the call: its functions expect shards, and gather them
    by options of their own. Only the stack shows the caller; a flag would stay set when a call raises an error.
    """
    call: FrameType | None = None
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "state_dict" and frame.f_locals.get("destination") is destination:
            call, above = frame, frame.f_locals.get("self")
            if above is not module and getattr(above, SETTING, None) is not None:
                return False
    while call is not None and call.f_code.co_name == "state_dict":
        call = call.f_back
    return call is None or call.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict"


def _params_by_name(module: nn.Module, own: Setting) -> dict[str, tuple[FSDPParam | None, StateDictSettings]]:
    """Return the managed parameters below ``module`` under each of their names, with the settings of their modules."""
    finder = SiteFinder()
    found: dict[str, tuple[FSDPParam | None, StateDictSettings]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, _ in inner._parameters.items():
            param = finder.find(Site(inner, name))
            if param is not None:
                setting = inner.__dict__.get(SETTING) or own  # own: for modules that were added later
                found[clean_name(f"{path}.{name}" if path else name)] = (param, setting.settings)
    return found


def _clean_metadata(destination: dict[str, Any], prefix: str) -> None:
    """Rename the entries of ``_metadata``, torch's versions of modules, to the names of the plain model."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        items = list(metadata.items())
        metadata.clear()
        metadata.update((prefix + clean_name(k[len(prefix) :]) if k.startswith(prefix) else k, v) for k, v in items)
