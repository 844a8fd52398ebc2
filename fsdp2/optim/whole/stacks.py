"""Stacks of matrices (the experts of a layer in one parameter): an optimizer of whole matrices steps on each of them.

Muon orthogonalizes matrices, so a parameter of three dimensions is a list of parameters to it. Each has an owner of its
own, and state of its own. In state dicts the state is stacked: it has the parameter's shape, and is sharded like it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn, optim

from fsdp2._torch.autograd import view_base
from fsdp2.engine.index import param_of
from fsdp2.engine.param import parameter_like
from fsdp2.optim.leaves import map_leaves, take_apart
from fsdp2.sharding.spec import on_this_rank

__all__ = ["Stacks"]

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


class Stacks:
    """The parameters of one optimizer that are stacks, and the matrices that stand for them in steps."""

    def __init__(self, optimizer: optim.Optimizer, stacked: Callable[[torch.Tensor], bool] | None) -> None:
        if stacked is None:
            stacked = _takes_matrices_alone if isinstance(optimizer, optim.Muon) else _never
        self._stacked = stacked
        self._known: dict[torch.Tensor, bool] = {}
        self._matrices: dict[torch.Tensor, list[nn.Parameter]] = {}
        self._stacks: dict[torch.Tensor, torch.Tensor] = {}  # of each matrix

    def has(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is a stack of matrices, of at least one.

        Raises:
            ValueError: The caller's function says so of a parameter that has not three dimensions.
        """
        if param not in self._known:
            found = bool(self._stacked(param))
            if found and param.ndim != 3:
                raise ValueError(
                    f"use_full_params: stacked() is true for a parameter of shape {tuple(param.shape)}; expected three "
                    "dimensions, of which the first counts the matrices; let it return False there"
                )
            self._known[param] = found and param.shape[0] > 0  # without matrices it is stepped on as one tensor
        return self._known[param]

    def matrices_of(self, param: torch.Tensor) -> list[nn.Parameter]:
        """Return the tensors that stand for the matrices of ``param``, always the same; they have no memory now."""
        if param not in self._matrices:
            empty = on_this_rank(param).detach().new_empty(0)
            self._matrices[param] = [parameter_like(param, empty.new_empty(0)) for _ in range(param.shape[0])]
            self._stacks.update(dict.fromkeys(self._matrices[param], param))
        return self._matrices[param]

    def keep(self, params: Collection[torch.Tensor]) -> None:
        """Forget all but ``params``."""
        left = set(params)
        self._known = {param: known for param, known in self._known.items() if param in left}
        self._matrices = {param: matrices for param, matrices in self._matrices.items() if param in left}
        self._stacks = {matrix: stack for matrix, stack in self._stacks.items() if stack in self._matrices}

    def stack_of(self, key: torch.Tensor) -> torch.Tensor:
        """Return the stack that ``key`` stands for a matrix of, else ``key``."""
        return self._stacks.get(key, key)

    @staticmethod
    def cut_state(state: Any, index: int) -> Any:
        """Return the state of one matrix: views of tensors that ``join_states`` has stacked, copies of numbers."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value[index] if value.ndim else value.clone()

        return map_leaves(leaf, state)

    @staticmethod
    def join_states(states: Sequence[Any]) -> Any:
        """Return the state of the stack: tensors stacked, and what is one number for all matrices once.

        Raises:
            RuntimeError: The optimizer keeps values of another type that differ between the matrices.
        """
        leaves = [take_apart(state)[0] for state in states]
        _, rebuild = take_apart(states[0])
        return rebuild(_joined(values) for values in zip(*leaves, strict=True))


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0 and all(torch.equal(first, other) for other in values[1:]):
            return first
        whole = view_base(first) if first.ndim else None
        if whole is not None and whole.shape == (len(values), *first.shape) and _are_views(whole, values):
            return whole  # the step wrote into what was cut
        return torch.stack(list(values))
    if any(other != first for other in values[1:]):
        raise RuntimeError(
            f"use_full_params: a stack of {len(values)} matrices has different {type(first).__name__} values in its "
            "state; expected tensors, or one value for all. Keep such values in tensors, or give every matrix a "
            "parameter of its own"
        )
    return first


def _are_views(whole: torch.Tensor, values: Sequence[torch.Tensor]) -> bool:
    pairs = zip(whole, values)
    return all(part.data_ptr() == value.data_ptr() and part.stride() == value.stride() for part, value in pairs)


def _takes_matrices_alone(param: torch.Tensor) -> bool:
    shard = param_of(param)
    return param.ndim == 3 and (shard is None or not isinstance(shard.module, _CONVOLUTIONS))


def _never(param: torch.Tensor) -> bool:
    return False
