"""Saving: what ``state_dict`` returns for the modules that a setting was made for."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import local_tensor
from fsdp2.engine.index import managed_slots, states_below
from fsdp2.engine.param import Slot
from fsdp2.engine.unit import FSDPState
from fsdp2.weights.state_dict.convert import full_of, gather_full, is_first_rank
from fsdp2.weights.state_dict.names import Managed, clean_name
from fsdp2.weights.state_dict.pieces import piece_of

__all__ = ["Converter", "Saver", "forget_running_call"]


class Converter:
    """Makes of the values of one state dict what a setting asks for.

    Parameters go one by one, so that only one full tensor exists beside those that are kept; on ranks that do not
    ask for full tensors (``rank0_only``) none is. A parameter with several names is gathered once and stays shared.
    """

    def __init__(self, kind: StateDictType, config: Any, states: list[FSDPState]) -> None:
        self.kind = kind
        self.offload = config.offload_to_cpu
        self.rank0_only = getattr(config, "rank0_only", False)
        self.keeps = not self.rank0_only or is_first_rank(states)
        self._full: dict[object, torch.Tensor | None] = {}
        self._copies: dict[object, torch.Tensor] = {}

    def __call__(self, value: Any, managed: Managed | None, name: str) -> Any:
        """``value`` as asked for; ``managed`` is the parameter it is, or is cut like."""
        if not isinstance(value, torch.Tensor):
            return value
        if self.kind is StateDictType.FULL_STATE_DICT:
            return self._whole(value, managed)
        value = value.cpu() if self.offload else value
        if self.kind is StateDictType.LOCAL_STATE_DICT and isinstance(value, DTensor):
            return piece_of(value, None if managed is None else managed[0].spec, name)
        return value

    @torch.no_grad()
    def _whole(self, value: torch.Tensor, managed: Managed | None) -> torch.Tensor | None:
        if not isinstance(value, DTensor):
            return self._copy(value.detach()) if self.keeps else None
        if managed is None:
            return self._kept(full_of(value))
        param, group = managed
        return self._kept(gather_full(local_tensor(value).detach(), param.spec, group.mesh, keep=self.keeps))

    def parameter(self, value: Any, managed: Managed, name: str) -> Any:
        """``value`` as asked for, where it is the parameter itself: several names share one tensor."""
        if self.kind is not StateDictType.FULL_STATE_DICT:
            return self(value, managed, name)
        if managed[0] not in self._full:
            self._full[managed[0]] = self._whole(value, managed)
        return self._full[managed[0]]

    def _kept(self, full: torch.Tensor | None) -> torch.Tensor | None:
        if full is None or not self.keeps:
            return None
        return full.cpu() if self.offload else full

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        """A copy that later training does not change; the same one for tensors that share their memory."""
        if value.is_meta or not value.numel():
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if key not in self._copies:
            self._copies[key] = value.cpu() if self.offload and value.device.type != "cpu" else value.clone()
        return self._copies[key]


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
    states: list[FSDPState]
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

    def __init__(self, settings: StateDictSettings | None, states: list[FSDPState]) -> None:
        self.settings = settings
        self.states = states

    def __deepcopy__(self, memo: dict[int, Any]) -> Saver:
        """Copies of modules start without a setting."""
        return Saver(None, [])

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Note that ``state_dict`` has come to ``module``."""
        if self.settings is None:
            return
        call = _running.call
        if call is not None:
            call.leave_to(module, prefix)
        if call is None or not call.inside:
            states = list(dict.fromkeys([*states_below(module), *self.states]))
            call = _running.call = _Call(managed_slots(states), states, _called_by_checkpointing())
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
                self._convert(call, destination, prefix)

    def _convert(self, call: _Call, destination: dict[str, Any], prefix: str) -> None:
        converters: dict[Saver, Converter] = {}

        def converter(saver: Saver) -> Converter:
            if saver not in converters:
                assert saver.settings is not None
                converters[saver] = Converter(
                    saver.settings.state_dict_type, saver.settings.state_dict_config, call.states
                )
            return converters[saver]

        converted: dict[str, Any] = {}
        for key in [key for key in destination if key.startswith(prefix)]:
            value = destination.pop(key)
            found = call.found.get(id(value))
            if found is None:
                convert = converter(self)
                new = convert(value, None, key)
            else:
                convert = converter(found.saver)
                new = convert.parameter(value, found.managed, key)
            if convert.keeps and converter(self).keeps:
                converted[prefix + clean_name(key[len(prefix) :])] = new
        destination.update(converted)
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
