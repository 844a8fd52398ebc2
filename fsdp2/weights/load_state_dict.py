"""Convert the values of a state dict to this rank's shards when it is loaded, without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2._naming import class_name
from fsdp2.autograd.hooks import hook_state_dict
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import groups_below, managed_sites, units_below
from fsdp2.engine.param import FSDPParam, Site, is_managed_tensor
from fsdp2.sharding.spec import ShardedSpec, dtensor_like, placed_alike
from fsdp2.weights.handed import copies_of_lent, why_unreadable
from fsdp2.weights.local_pieces import foreign_piece, is_piece
from fsdp2.weights.names import CHECKPOINTED, COMPILED, clean_name
from fsdp2.weights.select import loaded_plainly
from fsdp2.weights.whole import own_memory, whole_of

__all__ = ["after_load_tree", "before_load_tree", "hook_group"]


def hook_group(group: FSDPParamGroup) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of the modules that show parameters of ``group`` see its shards."""
    modules = dict.fromkeys(site.module for param in group.params for site in param.sites)
    hook_state_dict(modules, group, FSDPParamGroup.before_save, FSDPParamGroup.after_save, _load_shards, _adopt_loaded)


def _load_shards(
    group: FSDPParamGroup,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *unused: object,
) -> None:
    """Show shards on ``module``, and replace full tensors and pieces in ``state_dict`` by shards.

    A value of the wrong shape stays unchanged, and torch reports it.

    Raises:
        RuntimeError: A value cannot be read. A load of the whole unit has found it before.
    """
    if group.residency.summoned:  # the modules show plain parameters, which load as such
        return
    state_dict.update(copies_of_lent(state_dict, [group]))
    group.before_load()
    assign = bool(metadata.get("assign_to_params_buffers", False))
    for param in group.params:
        for site in param.sites:
            key = prefix + site.name
            if site.module is module and key in state_dict:
                state_dict[key] = _shard(group, state_dict[key], param, key, assign)


def _shard(group: FSDPParamGroup, value: Any, param: FSDPParam, key: str, assign: bool) -> Any:
    sharded: Any = param.sharded
    if problem := why_unreadable(value):
        raise RuntimeError(f"Error in loading state_dict: {clean_name(key)}: {problem}")
    if is_piece(value):
        problem = _wrong_piece(value, sharded, param.spec, key)
        if problem:
            raise RuntimeError(f"Error in loading state_dict: {problem}")
        local = value["piece"].detach()
    elif isinstance(value, torch.Tensor):
        # Files of very old torch versions have scalars of shape (1,), which torch loads too.
        if sharded.ndim == 0 and tuple(value.shape) == (1,):
            value = value[0]
        if value.shape != sharded.shape or placed_alike(value, sharded):
            return value
        whole = whole_of(value) if isinstance(value, DTensor) else value.detach()
        local = param.spec.cut(param.spec.of_plain(whole))
    else:
        return value
    if assign:
        if local.dtype == param.dtype and not param.local.is_meta and type(param.local) is torch.Tensor:
            # The parameter stays, and with it the optimizers that hold it. torch marks a state dict that was once
            # assigned, so that a rank that passes it assigns whatever it asks for, while the other ranks copy.
            with torch.no_grad():
                param.local.copy_(local)
            return sharded
        device = param.local.device  # it becomes the shard itself, without keeping a full tensor's memory alive
        if device.type == "meta" and not local.is_meta:
            device = group.store.home
        local = own_memory(local, param.spec, device)
    return param.spec.shard_as(local)


def _adopt_loaded(group: FSDPParamGroup, module: nn.Module, *unused: object) -> None:
    """Adopt shards that loading replaced on ``module``, under every name of a tied parameter."""
    if group.residency.summoned:
        return
    for param in group.params:
        if len(param.sites) < 2:
            continue
        for site in param.sites:
            shown = site.shown
            if site.module is module and shown is not None and shown is not param.sharded:
                param.sites[0].show(shown)
    group.residency.adopt(lasting=True)


def _wrong_piece(value: dict[str, Any], tensor: Any, spec: ShardedSpec | None, key: str) -> str:
    """Return the problem with a piece for ``tensor``, sharded by ``spec``, or "" if it is this rank's piece."""
    shape = torch.Size(value["shape"])
    return foreign_piece(value, tensor, spec, key) if shape == tensor.shape else _mismatch(key, shape, tensor.shape)


def _mismatch(key: str, got: torch.Size, expected: torch.Size) -> str:
    """Return torch's text for a size mismatch: scripts search for it."""
    return (
        f"size mismatch for {key}: copying a param with shape {got} from checkpoint, the shape in current model is "
        f"{expected}."
    )


# ---- a unit and all below it ----


def before_load_tree(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Prepare ``state_dict`` for ``module`` and all below it, before anything is loaded.

    Keys of the plain model are renamed for compiled submodules, full tensors are distributed for DTensor parameters
    that no group manages, and parameters that were added after ``fully_shard`` are sharded now instead of in the next
    forward.

    Raises:
        RuntimeError: Tensors have the wrong shape (all of them are listed, in torch's words), lie in memory that was
            freed, or are rounded; or there are shards or pieces for parameters that are not sharded. Nothing is loaded
            then.
    """
    _shard_added(module)
    if plain := [key for key in unexpected if prefix.endswith(f"{COMPILED}.") and f"{prefix}{key}" not in state_dict]:
        expected = next((key for key in plain if _has(module, key)), None)
        if expected is not None:
            errors.append(
                f"the model was compiled: got names without {prefix!r}, such as {expected!r}, expected "
                f"{prefix + expected!r}. Call model.{prefix[:-1]}.load_state_dict(), or load inside "
                "fsdp2.state_dict_type(model, ...)"
            )
    wrapper = CHECKPOINTED in dict(module.named_children())
    head = f"{CHECKPOINTED}." if wrapper else ""  # the wrapper's own hook has already renamed its keys
    _reach_compiled(module, state_dict, prefix, head)
    problems, assign = [], bool(metadata.get("assign_to_params_buffers", False))
    sites = managed_sites(units_below(module))
    for path, owner, name, tensor in loaded_plainly(module, ""):
        long = f"{path}.{name}" if path else name
        short = ".".join(part for part in long.split(".") if part != CHECKPOINTED)
        key = next((k for k in (prefix + head + short, prefix + long) if k in state_dict), "")
        value = state_dict.get(key)
        managed = sites.get(Site(owner, name))
        if problem := why_unreadable(value):
            problems.append(f"{clean_name(key)}: {problem}")
        elif is_piece(value) and managed is not None:
            problems.append(_wrong_piece(value, managed.sharded, managed.spec, clean_name(key)))  # type: ignore[arg-type]  # a dict
        elif is_piece(value) and isinstance(tensor, DTensor) and not is_managed_tensor(tensor):
            problems.append(_wrong_piece(value, tensor, None, clean_name(key)))  # type: ignore[arg-type]  # a dict
            if not problems[-1]:
                state_dict[key] = dtensor_like(tensor, value["piece"].detach())  # type: ignore[index]  # a dict
        elif is_piece(value) or (isinstance(value, DTensor) and _is_plain(tensor) and not assign):
            problems.append(
                f"{clean_name(key)} is not sharded here; got {'a piece' if is_piece(value) else 'a DTensor'}, expected "
                "a whole tensor. A parameter that was added after fully_shard is sharded by the next forward: run one "
                "before loading, or add the parameter before fully_shard"
            )
        elif not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(tensor):
            continue
        elif value.shape != tensor.shape:
            if tensor.ndim or tuple(value.shape) != (1,):
                problems.append(_mismatch(clean_name(key), value.shape, tensor.shape))
        elif isinstance(tensor, DTensor) and managed is None and not isinstance(value, DTensor):
            if not is_managed_tensor(tensor):
                state_dict[key] = distribute_tensor(
                    value.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
    if any(problems):
        text = "\n\t".join(problem for problem in problems if problem)
        raise RuntimeError(f"Error(s) in loading state_dict for {class_name(module)}:\n\t{text}")
    state_dict.update(copies_of_lent(state_dict, groups_below(module)))


def _shard_added(module: nn.Module) -> None:
    """Let the units below ``module`` shard parameters that were added after ``fully_shard``, so they can be loaded.

    Skip this if a parameter was added to ``module`` itself: torch is iterating over the loading hooks of ``module``,
    and a new group would add to them. Skip it also while ``summon_full_params`` shows parameters, which would look
    like added ones.
    """
    units = units_below(module)
    sites = managed_sites(units)
    own = [name for name, param in module._parameters.items() if param is not None]
    if all(Site(module, name) in sites for name in own) and all(unit.why_no_forward is None for unit in units):
        for unit in units:
            unit.notice_added()


def _has(module: nn.Module, key: str) -> bool:
    """Return whether ``key`` is a name in the state dict of ``module``."""
    path, _, name = key.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    return name in owner._parameters or name in dict(owner.named_buffers(recurse=False))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and not is_managed_tensor(tensor)


def after_load_tree(module: nn.Module, incompatible: Any) -> None:
    """Report missing and unexpected keys by the names of the plain model, unless these would be both."""
    found = incompatible.missing_keys, incompatible.unexpected_keys
    clean = [[clean_name(key) for key in keys] for keys in found]
    if set(clean[0]).isdisjoint(clean[1]):
        for keys, names in zip(found, clean):
            keys[:] = names


def _reach_compiled(module: nn.Module, state_dict: dict[str, Any], prefix: str, head: str) -> None:
    """Insert the infix of compiled submodules into keys below them; wrappers for checkpointing insert their own."""
    for path, _ in module.named_modules(remove_duplicate=False):
        parts = path.split(".")
        if parts[-1] != COMPILED:
            continue
        above = prefix + head + "".join(f"{part}." for part in parts[:-1] if part != CHECKPOINTED)
        for key in [k for k in state_dict if k.startswith(above) and not k.startswith(f"{above}{COMPILED}.")]:
            long = f"{above}{COMPILED}.{key[len(above) :]}"
            if long not in state_dict:  # otherwise the key is superfluous, and torch reports it
                state_dict[long] = state_dict.pop(key)
