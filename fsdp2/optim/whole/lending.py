"""What an optimizer sees during a step in place of parameters: a tensor for each, a tensor for each matrix of a stack,
or one for all matrices of one shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fsdp2.engine.param import lend_gradient, parameter_like, resemble, take_assigned
from fsdp2.optim.alike import is_counter
from fsdp2.optim.leaves import take_apart
from fsdp2.optim.whole.stacks import Stacks

__all__ = ["Alone", "Batch", "Lending", "Matrices", "batches_of"]


class Lending(Protocol):
    """Tensors that an optimizer sees."""

    @property
    def param(self) -> Any:
        """The parameter in whose place, and in whose group, the tensors are."""
        ...

    @property
    def seen(self) -> Sequence[Any]:
        """What the optimizer sees."""
        ...

    @property
    def states(self) -> Sequence[Any]:
        """The states of the tensors, or none."""
        ...

    def take_back(self, states: Sequence[Any]) -> dict[torch.Tensor, Any]:
        """Return the states by their keys in ``optimizer.state``; ``states`` are what the step has left, or none."""
        ...

    def end(self) -> None:
        """Let go of memory."""


class Alone:
    """One tensor for one key."""

    def __init__(self, param: Any, key: torch.Tensor, seen: torch.Tensor, states: Sequence[Any]) -> None:
        self.param, self._key, self.seen, self.states = param, key, [seen], states

    def take_back(self, states: Sequence[Any]) -> dict[torch.Tensor, Any]:
        """Return the state."""
        return {self._key: states[0]} if states else {}

    def end(self) -> None:
        """Do nothing: the caller has the memory."""


class Matrices:
    """The matrices of a plain stack, with its memory. They have one state, which is stacked."""

    def __init__(self, param: torch.Tensor, stacks: Stacks, states: Sequence[Any]) -> None:
        self.param, self.seen, grad = param, stacks.matrices_of(param), param.grad
        for i, matrix in enumerate(self.seen):
            resemble(matrix, param)
            matrix.data = param.data[i]
            lend_gradient(matrix, None if grad is None else grad[i])
        self.states = [Stacks.cut_state(state, i) for state in states for i in range(len(self.seen))]

    def take_back(self, states: Sequence[Any]) -> dict[torch.Tensor, Any]:
        """Return the state of the stack."""
        return {self.param: Stacks.join_states(states)} if states else {}

    def end(self) -> None:
        """Let go of the stack's memory."""
        for matrix, memory in zip(self.seen, self.param.data):
            take_assigned(matrix, memory)
            lend_gradient(matrix, None)
            matrix.data = matrix.data.new_empty(0)


class Batch:
    """Matrices of one shape in one tensor of three dimensions; each has its own state."""

    def __init__(self, param: Any, lent: Mapping[torch.Tensor, Any], states: Sequence[Any]) -> None:
        """``lent`` has the matrices by their keys; ``param`` is a parameter of their group."""
        self.param, self._lent = param, lent
        first = next(iter(lent.values()))
        self._batch: nn.Parameter = parameter_like(first, torch.stack([one.data for one in lent.values()]))
        lend_gradient(self._batch, torch.stack([one.grad for one in lent.values()]))
        self.seen, self.states = [self._batch], [Stacks.join_states(states)] if states else []

    def take_back(self, states: Sequence[Any]) -> dict[torch.Tensor, Any]:
        """Write what the step has made to the matrices; return the state of each, which is a view of the batch's."""
        for one, made in zip(self._lent.values(), self._batch.data):
            one.data.copy_(made)
        return {key: Stacks.cut_state(state, i) for state in states for i, key in enumerate(self._lent)}

    def end(self) -> None:
        """Do nothing: nobody else has the batch."""


def batches_of(
    lent: Mapping[torch.Tensor, Any],
    entries: Mapping[Any, Any],
    param_of: Callable[[torch.Tensor], Any],
    group_of: Callable[[Any], Hashable],
) -> Iterator[Lending]:
    """Yield ``lent``, and of it the matrices in batches: those of one group, shape and dtype, whose states can be one.

    ``entries`` has the states.
    """
    alike: defaultdict[Any, dict[torch.Tensor, Any]] = defaultdict(dict)
    for key, seen in lent.items():
        param, states = param_of(key), [entries[key]] if key in entries else []
        if seen.ndim == 2:
            kind = group_of(param), seen.shape, seen.dtype, seen.grad.dtype, *map(_numbers_in, states)
            alike[kind][key] = seen
        else:
            yield Alone(param, key, seen, states)
    for some in alike.values():
        yield Batch(param_of(next(iter(some))), some, [entries[key] for key in some if key in entries])


def _numbers_in(state: Any) -> Hashable:
    """Return what states that become one must have in common: counts of steps, and all that is no tensor.

    They differ if a matrix had no gradient in some step.
    """
    found: list[tuple[Any, Any]] = []
    for name, entry in state.items() if isinstance(state, dict) else [(None, state)]:
        for leaf in take_apart(entry)[0]:
            if not isinstance(leaf, torch.Tensor):
                found.append((name, repr(leaf)))
            elif is_counter(name):
                found.append((name, leaf.tolist()))
    return tuple(found)
