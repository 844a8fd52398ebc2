"""Compatibility with code for FSDP1: methods of its wrapper, and errors that name the replacement of an argument."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsdp2._warn import warn
from fsdp2.fsdp1.arguments import REMEDIES
from fsdp2.grouping.modules import no_sync
from fsdp2.optim.clip import clip_grad_norm_

__all__ = ["FSDP1Methods", "names_remedies", "refuse_fsdp1"]

F = TypeVar("F", bound=Callable[..., Any])

_REMEDIES = {
    **REMEDIES,
    "auto_wrap_policy": "pass policy=, which takes the same policies",
    "mixed_precision": "pass mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
    "sharding_strategy": "pass strategy=, which takes the same values",
    "device_mesh": "pass mesh=",
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "ignored_states": "pass ignored_params= or ignored_modules=",
    "sync_module_states": "call fsdp2.sync_module_states(model) before the first fully_shard",
}


def names_remedies(function: F) -> F:
    """Return ``function``, wrapped so that an argument of FSDP1 raises an error with the argument to use instead."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known and name in _REMEDIES:
                raise TypeError(f"fully_shard: {name}= is an argument of FSDP1, not of fully_shard; {_REMEDIES[name]}")
        return function(*args, **kwargs)

    return cast(F, call)


_SHARDED = "fsdp2.optim_state_dict(model, optimizer) inside fsdp2.state_dict_type(model, "
_LOADED = "fsdp2.optim_state_dict_to_load(model, optimizer, state_dict)"
_FUNCTIONS = {
    "set_state_dict_type": "fsdp2.set_state_dict_type with the same arguments",
    "state_dict_type": "fsdp2.state_dict_type with the same arguments",
    "get_state_dict_type": "fsdp2.get_state_dict_type with the same arguments",
    "summon_full_params": "fsdp2.summon_full_params with the same arguments",
    "optim_state_dict": "fsdp2.optim_state_dict with the same arguments",
    "optim_state_dict_to_load": "fsdp2.optim_state_dict_to_load with the same arguments",
    "full_optim_state_dict": _SHARDED + "StateDictType.FULL_STATE_DICT)",
    "sharded_optim_state_dict": _SHARDED + "StateDictType.SHARDED_STATE_DICT)",
    "shard_full_optim_state_dict": _LOADED,
    "flatten_sharded_optim_state_dict": _LOADED,
    "scatter_full_optim_state_dict": _LOADED,
    "no_sync": "fsdp2.no_sync(model), or model.no_sync()",
    "clip_grad_norm_": "model.clip_grad_norm_(max_norm), or fsdp2.clip_grad_norm_(model.parameters(), max_norm)",
    "register_comm_hook": "model.set_all_reduce_hook, model.set_custom_reduce_scatter or fully_shard(compression=...)",
    "apply": "model.apply(function), inside fsdp2.summon_full_params(model) if it reads whole parameters",
    "module": "the module itself: nothing is wrapped",
    "forward": "the module itself: nothing is wrapped",
    "named_parameters": "model.named_parameters()",
    "named_buffers": "model.named_buffers()",
    "check_is_root": "fsdp2.fsdp_modules(model, root_only=True)",
}
"""Functions of FSDP1's class, which look for its wrappers, and what to call instead."""


def refuse_fsdp1(frame: FrameType | None) -> None:
    """Raise an error if ``frame`` belongs to a function of FSDP1's class: it would find no wrapper of its own.

    These functions only read attributes of a module, as anybody may, so the frames tell who reads.

    ``FSDP.fsdp_modules`` is how libraries, and torch, ask for wrappers. The answer, none, is right; but a warning names
    ours where neither calls it.
    """
    called, listed = "", False
    for _ in range(12):
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        if frame is None or not module.startswith(("torch.distributed.fsdp.", "contextlib", "torch.utils._contextlib")):
            listed &= not module.startswith("torch.")
            break
        if module == "torch.distributed.fsdp.fully_sharded_data_parallel":
            called = frame.f_code.co_name if frame.f_code.co_name in _FUNCTIONS else called
            listed |= frame.f_code.co_name == "fsdp_modules"
        frame = frame.f_back
    if called:
        raise ValueError(
            f"FullyShardedDataParallel.{called} is for FSDP1's wrappers, and fsdp2.fully_shard manages this module; "
            f"use {_FUNCTIONS[called]}"
        )
    if listed:
        warn(
            "FullyShardedDataParallel.fsdp_modules finds FSDP1's wrappers, and fsdp2.fully_shard manages this module; "
            "fsdp2.fsdp_modules(model) finds its units"
        )


class _OnlyOfWrappers:
    """An attribute that FSDP1's methods read of a wrapper. Of our modules they get an error that names our method.

    All others see no attribute. What a module itself has of this name takes precedence.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: object, owner: type | None = None) -> Any:
        refuse_fsdp1(sys._getframe(1))
        raise AttributeError(self._name)


class FSDP1Methods:
    """Methods of FSDP1's wrapper that training loops call. The model's own methods of these names take precedence."""

    _is_root = _OnlyOfWrappers()
    _handle = _OnlyOfWrappers()
    _fsdp_wrapped_module = _OnlyOfWrappers()
    check_is_root = _OnlyOfWrappers()
    training_state = _OnlyOfWrappers()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside a ``with`` block, like ``fsdp2.no_sync(model)``."""
        return no_sync(cast(nn.Module, self))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients to a total norm of at most ``max_norm``, and return the norm before scaling."""
        return clip_grad_norm_(cast(nn.Module, self).parameters(), max_norm, norm_type)
