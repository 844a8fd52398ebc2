"""Arguments that a policy gives one unit: those of fully_shard, FSDP1's (translated), or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["REMEDIES", "merge_arguments"]

REMEDIES = {
    "process_group": "pass mesh=DeviceMesh.from_group(process_group, device_type)",
    "backward_prefetch": "leave it out: units are prefetched; set_modules_to_backward_prefetch changes the order",
    "forward_prefetch": "leave it out: units are prefetched; set_modules_to_forward_prefetch changes the order",
    "limit_all_gathers": "leave it out: memory is bounded by gathering one unit ahead",
    "use_orig_params": "leave it out: parameters always keep their names",
    "param_init_fn": "build on the meta device, shard, then call to_empty() and initialize, or load",
    "device_id": "leave it out: shards are on the mesh's device; make that the current device before the call",
}
"""What to do in place of FSDP1's arguments that fully_shard has under no name."""

_ADDED = ("ignored_params", "ignored_modules", "replicated_params")
_DECIDED = "the policy of the call decides for every submodule"
_REFUSED = {
    **REMEDIES,
    "policy": _DECIDED,
    "auto_wrap_policy": _DECIDED,
    "sync_module_states": "load or broadcast the weights once the whole model is sharded",
}


def merge_arguments(call: dict[str, Any], own: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` for the unit ``name``: those of the call, overridden by ``own``.

    Ignored and replicated parameters are added to those of the call. A strategy in ``own`` also overrides the call's
    ``reshard_after_forward``.

    Raises:
        TypeError: ``own`` has an argument that fully_shard lacks; the text gives the alternative.
    """
    own = _translate(own, f"policy: {name}", call)
    if "strategy" in own:
        own.setdefault("reshard_after_forward", None)
    added = {key: {*(call[key] or ()), *(own[key] or ())} for key in _ADDED if key in own}
    return {**call, **own, **added}


def _translate(own: dict[str, Any], where: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return ``own`` with FSDP1's names and values translated to those of ``known``."""
    found: dict[str, Any] = {}
    for key, value in own.items():
        if key in known:
            found[key] = value
        elif key in _TRANSLATED:
            found.update(_TRANSLATED[key](value, f"{where}: {key}"))
        elif key in _REFUSED:
            raise TypeError(f"{where}: {key}={value!r} is not supported for a unit of fsdp2; {_REFUSED[key]}")
        else:
            raise TypeError(f"{where}: got the argument {key!r}; expected one of {', '.join(known)}")
    return found


def _mixed_precision(value: Any, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, MixedPrecision):
        raise TypeError(f"{where}: expected a MixedPrecision or None, got {value!r}; use mp_policy for other classes")
    if value is None:
        return {"mp_policy": MixedPrecisionPolicy()}
    if value.buffer_dtype is not None:
        raise TypeError(
            f"{where}: got buffer_dtype={value.buffer_dtype}; buffers are not cast; cast buffer.data yourself"
        )
    if value.keep_low_precision_grads:
        raise TypeError(f"{where}: got keep_low_precision_grads=True; gradients have the dtype of their parameters")
    policy = MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype or value.param_dtype,  # FSDP1's default with every torch
        cast_forward_inputs=value.cast_forward_inputs,
    )
    return {"mp_policy": policy}


def _cpu_offload(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, (CPUOffload, bool, type(None))):
        raise TypeError(f"{where}: expected a CPUOffload, a bool or None, got {value!r}")
    offloads = value.offload_params if isinstance(value, CPUOffload) else bool(value)
    return {"offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy()}


def _ignored_states(value: Any, where: str) -> dict[str, Any]:
    states = list(value or ())
    for key, kind in (("ignored_params", nn.Parameter), ("ignored_modules", nn.Module)):
        if all(isinstance(state, kind) for state in states):
            return {key: states}
    raise TypeError(f"{where}: expected parameters or modules, got {states!r}")


_TRANSLATED: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "sharding_strategy": lambda value, where: {"strategy": value},
    "device_mesh": lambda value, where: {"mesh": value},
    "mixed_precision": _mixed_precision,
    "cpu_offload": _cpu_offload,
    "ignored_states": _ignored_states,
}
