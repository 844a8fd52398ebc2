"""Save and load optimizer state keyed by parameter names: full, sharded or local, as set for the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2._naming import class_name
from fsdp2._warn import warn
from fsdp2.fsdp1.state_dict.convert import Item, convert
from fsdp2.fsdp1.state_dict.settings import get_state_dict_type
from fsdp2.optim.alike import is_counter
from fsdp2.optim.leaves import keys_in, map_leaves, take_apart
from fsdp2.optim.prebuilt import repair
from fsdp2.sharding.spec import dtensor_like, placed_alike
from fsdp2.weights.buckets import Entry, Part
from fsdp2.weights.local_pieces import foreign_piece, is_piece
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, ranks_of, select
from fsdp2.weights.transfer import transfer
from fsdp2.weights.whole import own_memory, whole_of

__all__ = ["optim_state_dict", "optim_state_dict_to_load"]

_SMALL = 64
"""Tensors with at most so many elements, mostly step counters, are sent inside the pickled state, not one by one."""
_MOMENTS = frozenset(
    (
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
        "variance",
    )
)
"""The names that torch's optimizers give to state with the shape of the parameter."""


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of ``optim``, keyed by parameter names of the plain model, in the kind set for ``model``.

    Args:
        model: The model, or any module that has all parameters of ``optim``.
        optim: The optimizer of all or some of the model's parameters.
        optim_state_dict: The state to convert; ``optim.state_dict()`` if None.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``. The values of a full state are whole
        tensors, on the CPU unless ``FullOptimStateDictConfig(offload_to_cpu=False)`` is set; with ``rank0_only`` all
        ranks but the first get an empty dictionary. The values of a sharded state are DTensors, those of a local one
        pieces. Every rank must call it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``optim`` trains a parameter that ``model`` does not have, or the state to convert is that of
            another optimizer: its groups have other numbers of parameters.
    """
    where = "optim_state_dict"
    _check_types(where, model, optim)
    settings = get_state_dict_type(model)
    # A full state is gathered: a rank that raised an error alone would leave the others waiting.
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    with (ranks_of(model, managed=True) or Ranks.world()).agreed() if full else contextlib.nullcontext():
        places = _places(where, model, optim)
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        _check_form(where, given)
        by_key: dict[Any, torch.Tensor] = dict(enumerate(_params(optim)))
        if "param_groups" in given:
            _check_sizes(given["param_groups"], optim)
            pairs = zip(optim.param_groups, given["param_groups"])
            by_key = {key: param for group, saved in pairs for key, param in zip(saved["params"], group["params"])}
    names, items, trees = [], [], []
    for key, state in given["state"].items():
        place = places.get(by_key.get(key))
        names.append(key if place is None else place.name)
        leaves, rebuild = take_apart(state, is_piece)
        trees.append((rebuild, len(leaves)))
        for leaf, path in zip(leaves, keys_in(state, is_piece)):
            param = place.param if place is not None and placed_alike(leaf, place.tensor) else None
            items.append(Item(leaf, f"{names[-1]}: {'.'.join(path)}", param))
    converted = convert(items, model, settings.state_dict_type, settings.optim_state_dict_config)
    if converted is None:
        return {}
    values = iter(converted)
    states = [rebuild([next(values) for _ in range(count)]) for rebuild, count in trees]
    result: dict[str, Any] = {"state": dict(zip(names, states))}
    if "param_groups" in given:
        result["param_groups"] = [
            {**saved, "params": [places[param].name for param in group["params"]]}
            for group, saved in zip(optim.param_groups, given["param_groups"])
        ]
    return result


def _check_types(where: str, model: object, optim: object) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optim, torch.optim.Optimizer):
        raise TypeError(f"{where}: expected a module and its optimizer, got {type(model)} and {type(optim)}")


def _places(where: str, model: nn.Module, optim: torch.optim.Optimizer) -> dict[Any, Place]:
    """Replace stale parameters of ``optim``, and return the place of each parameter of ``model``.

    Raises:
        ValueError: ``optim`` trains a parameter that ``model`` does not have.
    """
    repair(optim)
    places = {place.tensor: place for place in select(model, where).places}
    for number, group in enumerate(optim.param_groups):
        for param in group["params"]:
            if param not in places:
                raise ValueError(
                    f"{where}: a parameter of shape {tuple(param.shape)} in group {number} of the optimizer is not a "
                    f"parameter of {class_name(model)}; pass the model whose parameters the optimizer was given"
                )
    return places


def _check_form(where: str, given: Any) -> None:
    """Raise TypeError unless ``given`` looks like the state dict of an optimizer."""
    if not isinstance(given, Mapping):
        got = f"a {type(given).__name__}"
    elif not isinstance(given.get("state"), Mapping):
        got = f"'state' that is {given['state']!r:.60}" if "state" in given else f"the keys {list(given)[:5]}"
    else:
        groups = given.get("param_groups", ())
        if isinstance(groups, (list, tuple)) and all(isinstance(one, Mapping) and "params" in one for one in groups):
            return
        got = f"'param_groups' that are {groups!r:.60}"
    raise TypeError(
        f"{where}: expected a dictionary with 'state', a dictionary too, and maybe 'param_groups', a list of "
        f"dictionaries with 'params'; got {got}. Pass an optimizer's state dict, as fsdp2.optim_state_dict returns it"
    )


def _check_sizes(groups: Sequence[Mapping[str, Any]], optim: torch.optim.Optimizer) -> None:
    """Raise ValueError if ``groups`` are those of another optimizer: their numbers would stand for other parameters."""
    sizes, expected = ([len(group["params"]) for group in some] for some in (groups, optim.param_groups))
    if sizes != expected:
        raise ValueError(
            f"optim_state_dict: the state to convert has groups of {sizes} parameters, expected {expected} as in the "
            "optimizer; pass the state dict of this optimizer, or none"
        )


def _params(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of ``optim`` in the order in which its state dict numbers them."""
    return list(dict.fromkeys(param for group in optim.param_groups for param in group["params"]))


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
) -> dict[str, Any]:
    """Convert a state that is keyed by parameter names of the plain model to one for ``optim.load_state_dict``.

    Whole tensors, DTensors and this rank's pieces are accepted under any setting of ``model``. They are sharded without
    communication and copied. With ``FullOptimStateDictConfig(rank0_only=True)``, only the first rank's argument is
    used, and its tensors are sent to the other ranks one at a time. State of parameters that ``optim`` does not train
    is left out. Groups get the hyperparameters that their parameters were saved with, in any order of groups. The state
    dict of a plain optimizer, which numbers its parameters, is accepted too: the numbers stand for the parameters of
    ``optim`` in the same order, or for the names that the optimizer was built with.

    Args:
        model: The model, sharded or not.
        optim: The optimizer of all or some of the model's parameters.
        optim_state_dict: The result of ``fsdp2.optim_state_dict``, from any number of ranks.
        is_named_optimizer: True if ``optim`` itself keys its state by parameter names.
        load_directly: Also call ``optim.load_state_dict`` with the result.

    Returns:
        A state dict for ``optim.load_state_dict``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A tensor does not fit its parameter, one group's parameters were saved with different
            hyperparameters, or the numbered parameters differ from those of ``optim`` in their count in any group.
    """
    where, ranks = "optim_state_dict_to_load", Ranks.alone()
    _check_types(where, model, optim)
    if getattr(get_state_dict_type(model).optim_state_dict_config, "rank0_only", False):
        ranks = ranks_of(model, managed=True) or Ranks.world()
    given: Any = None
    with ranks.agreed():
        places = _places(where, model, optim)
        by_name = {name: place for place in places.values() for name in place.names}
        # With several ranks only the first rank's argument is used; the others may have passed anything.
        if ranks.first:
            given = _as_dictionaries(optim_state_dict)
            _check_form(where, given)
            given = _numbers_to_names(given, optim, places)
    saved = _convert_state(given, by_name, ranks)
    states = {clean_name(key) if isinstance(key, str) else key: value for key, value in saved["state"].items()}
    keys = {param: places[param].name if is_named_optimizer else i for i, param in enumerate(_params(optim))}
    result: dict[str, Any] = {"state": {}}
    for param, key in keys.items():
        name = next((name for name in places[param].names if name in states), None)
        if name is not None:
            result["state"][key] = states.pop(name)
    others = {key: value for key, value in states.items() if key not in by_name}
    lost = [key for key, value in others.items() if isinstance(key, str) and isinstance(value, Mapping)]
    if lost:
        warn(
            f"optim_state_dict_to_load: no parameters of the model have the names {lost}; their state is passed on "
            "unchanged and has no effect"
        )
    result["state"].update(others)
    if "param_groups" in saved:
        homes = _groups_to_load(optim, saved["param_groups"], places)
        result["param_groups"] = [
            {**home, "params": [keys[param] for param in group["params"]]}
            for home, group in zip(homes, optim.param_groups)
        ]
    if load_directly:
        optim.load_state_dict(result)
    return result


def _groups_to_load(
    optim: torch.optim.Optimizer, saved: list[dict[str, Any]], places: Mapping[Any, Place]
) -> list[dict[str, Any]]:
    """Return for each of the optimizer's groups the hyperparameters that its parameters were saved with, or its own."""
    group_of = {clean_name(str(name)): number for number, group in enumerate(saved) for name in group["params"]}
    result = []
    for number, group in enumerate(optim.param_groups):
        homes: dict[int, str] = {}
        for param in group["params"]:
            for name in places[param].names:
                if name in group_of:
                    homes.setdefault(group_of[name], name)
        if not homes and not group["params"] and len(saved) == len(optim.param_groups):
            homes = {number: ""}
        # "param_names" lists the group's own parameters in their order; it is no hyperparameter.
        own = {key: group[key] for key in ("param_names",) if key in group}
        options = [
            {key: value for key, value in saved[home].items() if key not in ("params", "param_names")} for home in homes
        ]
        if any(other != options[0] for other in options[1:]):
            raise ValueError(
                f"optim_state_dict_to_load: group {number} of the optimizer holds {list(homes.values())}, which were "
                "saved in groups with different hyperparameters; build the optimizer with groups like the saved ones"
            )
        result.append({**options[0], **own} if options else group)
    return result


def _numbers_to_names(saved: Any, optim: torch.optim.Optimizer, places: Mapping[Any, Place]) -> Any:
    """Return ``saved`` with parameter names in place of the numbers of an optimizer's own state dict.

    Raises:
        ValueError: The groups of ``saved`` and of ``optim`` differ in size, or state belongs to an unknown number.
    """
    groups = saved.get("param_groups")
    held = [key for group in groups or () for key in group["params"]]
    if not any(isinstance(key, int) for key in (*saved["state"], *held)):
        return saved
    own = [[places[param].name for param in group["params"]] for group in optim.param_groups]
    if groups is None:
        names: dict[Any, str] = {i: places[param].name for i, param in enumerate(_params(optim))}
    elif all("param_names" in group for group in groups):
        names = {key: name for group in groups for key, name in zip(group["params"], group["param_names"])}
    else:
        sizes, expected = [len(group["params"]) for group in groups], [len(group) for group in own]
        if sizes != expected:
            raise ValueError(
                f"optim_state_dict_to_load: the state dict has numbers as names, in groups of {sizes} parameters, "
                f"expected {expected} as in the optimizer; save with fsdp2.optim_state_dict, which names parameters"
            )
        names = {key: name for group, home in zip(groups, own) for key, name in zip(group["params"], home)}
    strange = [key for key in saved["state"] if isinstance(key, int) and key not in names]
    if strange:
        raise ValueError(
            f"optim_state_dict_to_load: the numbers {strange} in the state belong to no parameter; expected those of "
            f"the groups, {list(names)}; save with fsdp2.optim_state_dict, which names parameters"
        )
    result = {**saved, "state": {names.get(key, key): value for key, value in saved["state"].items()}}
    if groups is not None:
        result["param_groups"] = [{**g, "params": [names.get(key, key) for key in g["params"]]} for g in groups]
    return result


# ---- the values of a state, sharded like parameters ----


def _as_dictionaries(value: Any) -> Any:
    """Return ``value`` with mappings of any type converted to dictionaries, which the tree functions expect."""
    if is_piece(value) or not isinstance(value, Mapping):
        return value
    return {key: _as_dictionaries(inner) for key, inner in value.items()}


@torch.no_grad()
def _convert_state(state_dict: Any, by_name: Mapping[str, Place], ranks: Ranks) -> Any:
    """Return the state dict of the first of ``ranks``, with values copied and sharded for this rank's optimizer.

    With several ranks, each also needs a bucket of the size of the largest tensor. One rank alone does not communicate.
    Every rank raises the errors.

    Raises:
        TypeError: The first of several ranks passed values that are not whole.
        ValueError: A value does not fit its parameter.
    """
    sent: list[torch.Tensor] = []
    received = ranks.size > 1
    if received:
        with ranks.agreed():
            if ranks.first:
                state_dict = map_leaves(lambda value: _announce(value, sent), state_dict, is_piece)
        state_dict = ranks.share(state_dict)
    result, rebuild = take_apart(state_dict, is_piece)
    keys = keys_in(state_dict, is_piece)

    def take(index: int, value: Any) -> None:
        part, name, key, *_ = *keys[index], "", "", ""
        place = by_name.get(clean_name(name)) if part == "state" else None
        if place is not None:
            moment = key in _MOMENTS and len(keys[index]) == 3  # not a tensor nested inside the moment
            where = f"{clean_name(name)}: {key}"
            result[index] = _value_to_load(value, place, where, counter=is_counter(key), moment=moment)
        elif received:  # it lies in the bucket, whose memory is reused
            result[index] = value.clone()

    with ranks.agreed():
        for index, leaf in enumerate(result):
            if isinstance(leaf, torch.Tensor) or is_piece(leaf):
                take(index, leaf)
    coming = [(index, leaf) for index, leaf in enumerate(result) if isinstance(leaf, Entry)]
    entries = [entry for _, entry in coming]
    largest = max((entry.nbytes for entry in entries), default=0)  # so every tensor is one part

    def fill(part: Part, view: torch.Tensor) -> None:
        view.copy_(sent[part.index])

    with ranks.agreed():
        transfer(entries, ranks, largest, fill, lambda part, view: take(coming[part.index][0], view))
    return rebuild(result)


def _announce(value: Any, sent: list[torch.Tensor]) -> Any:
    """Return the entry that stands for ``value`` until it is sent; small tensors stand for themselves."""
    if isinstance(value, DTensor) or is_piece(value):
        raise TypeError(
            "optim_state_dict_to_load: with rank0_only the first rank must give whole tensors, got a "
            f"{type(value).__name__}; load sharded or local state without rank0_only, on every rank"
        )
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() <= _SMALL:
        return value.detach().cpu()
    sent.append(value.detach())
    return Entry(tuple(value.shape), value.dtype)


def _value_to_load(value: Any, place: Place, where: str, *, counter: bool, moment: bool) -> torch.Tensor:
    """Return a copy of ``value``, sharded like the parameter if it has its shape, otherwise whole."""
    param, managed = place.tensor, place.param
    if is_piece(value):
        if not isinstance(param, DTensor):
            raise ValueError(
                f"{where}: got a piece, expected a whole tensor for a parameter that is not sharded; pass "
                "fsdp2.merge_local_state_dicts(the list of all ranks' state dicts)"
            )
        if problem := foreign_piece(value, param, managed.spec if managed else None, where):
            raise ValueError(problem)
        local = value["piece"].detach()
        if managed is None:
            return dtensor_like(param, local.to(param.device, copy=True))
    elif placed_alike(value, param):
        return value.detach().clone()
    else:
        whole = whole_of(value) if isinstance(value, DTensor) else value.detach()
        if not isinstance(param, DTensor) or whole.shape != param.shape or counter:
            _check_shape(whole, param, where, moment)
            return whole.clone()
        if managed is None:
            whole = whole.to(param.device)
            return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).clone()
        local = managed.spec.cut(managed.spec.of_plain(whole))
    return managed.spec.shard_as(own_memory(local, managed.spec, managed.local.device))


def _check_shape(value: torch.Tensor, param: torch.Tensor, where: str, moment: bool) -> None:
    """Raise ValueError if ``value`` cannot be state of ``param``.

    Factored states have fewer dimensions, or size 1 in some. A moment, and any other state with as many dimensions,
    must have the parameter's shape. A single number may be state of the whole parameter, under any name.
    """
    alike = value.ndim == param.ndim and any(got not in (1, size) for got, size in zip(value.shape, param.shape))
    if alike or (moment and value.numel() != 1 and value.shape != param.shape):
        raise ValueError(
            f"optim_state_dict_to_load: {where} has shape {tuple(value.shape)}, expected {tuple(param.shape)} as the "
            "parameter; load the state of the same model"
        )
