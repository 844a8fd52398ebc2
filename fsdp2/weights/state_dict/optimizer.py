"""Optimizer state by the names of parameters: full, sharded or local, as set for the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import pytree
from fsdp2.engine.param import FSDPParam
from fsdp2.optim.prebuilt import repair
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, ranks_of, select
from fsdp2.weights.state_dict.convert import Item, convert
from fsdp2.weights.state_dict.from_first_rank import from_first_rank
from fsdp2.weights.state_dict.pieces import foreign_piece, is_piece
from fsdp2.weights.state_dict.settings import get_state_dict_type
from fsdp2.weights.whole import cut, distribute_locally, is_cut_like, own_memory, whole_of

__all__ = ["optim_state_dict", "optim_state_dict_to_load"]


@dataclass
class _Parameters:
    """A model's parameters as its optimizer knows them."""

    settings: StateDictSettings
    ranks: Ranks
    places: dict[Any, Place]

    @classmethod
    def of(cls, where: str, model: nn.Module, optim: torch.optim.Optimizer) -> _Parameters:
        """Look at ``model``, and let ``optim`` hold its shards.

        Raises:
            TypeError: arguments of the wrong type.
            ValueError: ``optim`` trains a parameter that ``model`` does not have.
        """
        if not isinstance(model, nn.Module) or not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"{where}: expected a module and its optimizer, got {type(model)} and {type(optim)}")
        repair(optim)
        places = {place.tensor: place for place in select(model, where).places}
        for number, group in enumerate(optim.param_groups):
            for param in group["params"]:
                if param not in places:
                    raise ValueError(
                        f"{where}: a parameter of shape {tuple(param.shape)} in group {number} of the optimizer is no "
                        f"parameter of {type(model).__name__}; pass the model whose parameters the optimizer was given"
                    )
        return cls(get_state_dict_type(model), ranks_of(model, managed=True) or Ranks.world(), places)

    def to_load(self, name: str, key: Any, value: Any) -> Any:
        """A copy of ``value``, of the state of the parameter ``name``, as this rank's optimizer keeps it."""
        name = clean_name(name)
        param = self.by_name.get(name)
        if param is None:
            return value.clone()
        return _value_to_load(value, param, self.places[param].param, f"{name}: {key}", key == "step")

    @cached_property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The parameters under each of their names."""
        return {name: param for param, place in self.places.items() for name in place.names}

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """The first name of each parameter of a group."""
        return [self.places[param].name for param in group["params"]]


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The state of ``optim``, keyed by parameter names of the plain model, in the form that is set for ``model``.

    Args:
        model: The model, or any module that has all parameters of ``optim``.
        optim: Its optimizer, of all parameters or of some.
        optim_state_dict: The state to convert; ``optim.state_dict()`` if None.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``. Full: whole tensors, on the CPU
        unless ``FullOptimStateDictConfig(offload_to_cpu=False)``; with ``rank0_only`` an empty dictionary on all
        ranks but the first. Sharded: DTensors. Local: pieces. Every rank must call it.

    Raises:
        ValueError: ``optim`` trains a parameter that ``model`` does not have.
    """
    known = _Parameters.of("optim_state_dict", model, optim)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    by_key = dict(_keys(optim, given))
    names, items, trees = [], [], []
    for key, state in given["state"].items():
        param = by_key.get(key)
        name = key if param is None else known.places[param].name
        leaves, tree = pytree.tree_flatten(state, is_leaf=is_piece)
        names.append(name)
        trees.append(tree)
        items += [Item(leaf, f"{name}: state {i}", _alike(leaf, param, known)) for i, leaf in enumerate(leaves)]
    settings = known.settings
    whole = convert(items, model, settings.state_dict_type, settings.optim_state_dict_config)
    if whole is None:
        return {}
    values = iter(whole)
    converted = [pytree.tree_unflatten([next(values) for _ in range(tree.num_leaves)], tree) for tree in trees]
    result: dict[str, Any] = {"state": dict(zip(names, converted))}
    if "param_groups" in given:
        result["param_groups"] = [
            {**saved, "params": known.names_of(group)}
            for group, saved in zip(optim.param_groups, given["param_groups"])
        ]
    return result


def _map(convert: Any, state: Any) -> Any:
    """``state`` with its tensors and pieces converted, wherever in it they are."""
    return pytree.tree_map(
        lambda value: convert(value) if isinstance(value, torch.Tensor) or is_piece(value) else value,
        state,
        is_leaf=is_piece,
    )


def _alike(value: Any, param: torch.Tensor | None, known: _Parameters) -> FSDPParam | None:
    """The managed parameter that ``value``, of the state of ``param``, is cut like."""
    if not isinstance(value, DTensor) or not isinstance(param, DTensor) or not is_cut_like(value, param):
        return None
    return known.places[param].param


def _keys(optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The key and the parameter of each entry of an optimizer's own state dict."""
    groups = state_dict.get("param_groups")
    if groups is None:
        params = dict.fromkeys(param for group in optim.param_groups for param in group["params"])
        yield from enumerate(params)
        return
    for group, saved in zip(optim.param_groups, groups):
        yield from zip(saved["params"], group["params"])


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
) -> dict[str, Any]:
    """Convert a state keyed by parameter names of the plain model to one that ``optim.load_state_dict`` takes.

    Whole tensors, DTensors and pieces of this rank are accepted under any setting of ``model``; they are sharded
    without communication and copied. With ``FullOptimStateDictConfig(rank0_only=True)`` only the first rank's argument
    is used, and sent to the others one tensor at a time. State of parameters that ``optim`` does not train is left out.
    Groups get the hyperparameters that their parameters were saved with, in any order of groups.

    Args:
        model: The model, sharded or not.
        optim: Its optimizer, of all parameters or of some.
        optim_state_dict: What ``fsdp2.optim_state_dict`` returned, here or for another number of ranks.
        is_named_optimizer: ``optim`` itself keys its state by parameter names.
        load_directly: Also call ``optim.load_state_dict`` with the result.

    Raises:
        ValueError: a tensor does not fit its parameter, or one group's parameters were saved with different
            hyperparameters.
    """
    known = _Parameters.of("optim_state_dict_to_load", model, optim)
    config = known.settings.optim_state_dict_config
    saved: Any = optim_state_dict
    sent = bool(getattr(config, "rank0_only", False)) and known.ranks.size > 1
    if sent:
        saved = from_first_rank(saved, known.ranks, known.to_load)
    if not isinstance(saved, Mapping) or "state" not in saved:
        raise TypeError(f"optim_state_dict_to_load: expected a dictionary with 'state', got {type(saved).__name__}")
    states = {clean_name(key) if isinstance(key, str) else key: value for key, value in saved["state"].items()}
    result: dict[str, Any] = {"state": {}}
    for index, param in enumerate(dict.fromkeys(p for group in optim.param_groups for p in group["params"])):
        names = known.places[param].names
        name = next((name for name in names if name in states), None)
        if name is not None:
            key = names[0] if is_named_optimizer else index
            state = states.pop(name)
            if isinstance(state, Mapping) and not sent:
                state = {part: _map(partial(known.to_load, name, part), value) for part, value in state.items()}
            result["state"][key] = state
    result["state"].update(_of_nobody(states, known))
    if "param_groups" in saved:
        result["param_groups"] = _groups_to_load(optim, saved["param_groups"], known, is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


def _of_nobody(states: Mapping[Any, Any], known: _Parameters) -> dict[Any, Any]:
    """State that belongs to no parameter: it is passed on as it is, with a warning where it may have been meant to."""
    others = {key: value for key, value in states.items() if key not in known.by_name}
    lost = [key for key, value in others.items() if isinstance(key, str) and isinstance(value, Mapping)]
    if lost:
        warnings.warn(
            f"optim_state_dict_to_load: no parameters of the model have the names {lost}; their state is passed on "
            "unchanged and has no effect",
            stacklevel=3,
        )
    return others


@torch.no_grad()
def _value_to_load(value: Any, param: torch.Tensor, managed: FSDPParam | None, where: str, counter: bool) -> Any:
    """A copy of ``value`` cut like ``param``; what does not have its shape stays whole."""
    if is_piece(value):
        return _piece_to_load(value, param, managed, where)
    value = value.detach()
    if not isinstance(param, DTensor):
        whole = whole_of(value) if isinstance(value, DTensor) else value.clone()
        _check_shape(whole, param, where)
        return whole
    if isinstance(value, DTensor):
        if is_cut_like(value, param):
            return value.clone()
        value = whole_of(value)
    if value.shape != param.shape or counter:
        _check_shape(value, param, where)
        return value.clone()
    if managed is None:
        return distribute_locally(value.to(param.device), param.device_mesh, param.placements).clone()
    return _shard(cut(value, managed.spec), managed)


def _shard(local: torch.Tensor, param: FSDPParam) -> torch.Tensor:
    """A copy of ``local`` as the shard of something cut like ``param``."""
    return param.spec.shard_as(own_memory(local, param.spec, param.local.device))


def _piece_to_load(
    value: Mapping[str, Any], param: torch.Tensor, managed: FSDPParam | None, where: str
) -> torch.Tensor:
    if managed is None:
        raise ValueError(
            f"{where}: got a piece, expected a whole tensor for a parameter that is not sharded; pass "
            "fsdp2.merge_local_state_dicts(the list of all ranks' state dicts)"
        )
    problem = foreign_piece(value, param.shape, managed.spec, where)
    if problem:
        raise ValueError(problem)
    return _shard(value["piece"].detach(), managed)


def _check_shape(value: torch.Tensor, param: torch.Tensor, where: str) -> None:
    """Factored states have fewer dimensions, or 1 in some; anything else of a parameter's rank must have its shape."""
    if value.ndim == param.ndim and any(got not in (1, size) for got, size in zip(value.shape, param.shape)):
        raise ValueError(
            f"optim_state_dict_to_load: {where} has shape {tuple(value.shape)}, expected {tuple(param.shape)} as the "
            "parameter; load the state of the same model"
        )


def _groups_to_load(
    optim: torch.optim.Optimizer, saved: list[dict[str, Any]], known: _Parameters, named: bool
) -> list[dict[str, Any]]:
    """The optimizer's groups as they are now, each with the hyperparameters its parameters were saved with."""
    group_of = {clean_name(str(name)): number for number, group in enumerate(saved) for name in group["params"]}
    indices = {param: i for i, param in enumerate(dict.fromkeys(p for g in optim.param_groups for p in g["params"]))}
    result = []
    for number, group in enumerate(optim.param_groups):
        homes: dict[int, str] = {}
        for param in group["params"]:
            for name in known.places[param].names:
                if name in group_of:
                    homes.setdefault(group_of[name], name)
        if not homes and not group["params"] and len(saved) == len(optim.param_groups):
            homes = {number: ""}
        options = [{key: value for key, value in saved[home].items() if key != "params"} for home in homes]
        if any(other != options[0] for other in options[1:]):
            raise ValueError(
                f"optim_state_dict_to_load: group {number} of the optimizer holds {list(homes.values())}, which were "
                "saved in groups with different hyperparameters; build the optimizer with groups like the saved ones"
            )
        now = {key: value for key, value in group.items() if key != "params"}
        keys = known.names_of(group) if named else [indices[param] for param in group["params"]]
        result.append({**(options[0] if options else now), "params": keys})
    return result
