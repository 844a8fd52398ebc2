"""Modules whose outputs and inputs hide tensors in containers, and the loss that finds the tensors in any output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Pair(NamedTuple):
    """A named tuple of results."""

    left: Tensor
    right: Tensor


@dataclass
class Result:
    """A dataclass, possibly with another one inside."""

    value: Tensor
    note: str
    inner: Any = None


@dataclass(frozen=True)
class FrozenResult:
    """A dataclass whose fields cannot be set."""

    value: Tensor


class Box:
    """A plain object with tensors among its attributes."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.note = "plain"
        self.more = {"nested": [value * 2]}


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("__hidden", "value")

    def __init__(self, value: Tensor) -> None:
        self.value, self.__hidden = value, value * 2

    def parts(self) -> list[Tensor]:
        """Return the tensors."""
        return [self.value, self.__hidden]


class Node:
    """A container known to pytree only."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


pytree.register_pytree_node(
    Node,
    lambda node: (list(node.parts), None),
    lambda parts, _: Node(*parts),
    serialized_type_name="tests.support.shapes.Node",
)

KINDS = (
    "tensor",
    "tuple",
    "list",
    "dict",
    "ordered_dict",
    "named_tuple",
    "dataclass",
    "nested_dataclass",
    "frozen_dataclass",
    "pytree",
    "object",
    "slots",
    "set",
    "with_none",
)
PLAIN_OBJECTS = ("pytree", "object", "slots", "set")
"""Kinds in which torch's fully_shard finds no tensor."""


def wrap(kind: str, x: Tensor) -> Any:
    """Return a container of this kind around ``x``."""
    makers: dict[str, Any] = {
        "tensor": lambda: x,
        "tuple": lambda: (x, x * 2),
        "list": lambda: [x, [x * 2]],
        "dict": lambda: {"a": x, "b": {"c": x * 2}},
        "ordered_dict": lambda: OrderedDict(a=x, b=x * 2),
        "named_tuple": lambda: Pair(x, x * 2),
        "dataclass": lambda: Result(x, "a note"),
        "nested_dataclass": lambda: Result(x, "outer", inner=Result(x * 2, "inner", inner=(x * 3,))),
        "frozen_dataclass": lambda: FrozenResult(x),
        "pytree": lambda: Node(x, Node(x * 2)),
        "object": lambda: Box(x),
        "slots": lambda: Slots(x),
        "set": lambda: {x},
        "with_none": lambda: (None, x, "text", 3),
    }
    return makers[kind]()


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of any container above, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif is_dataclass(value):
        yield from tensors([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Slots):
        yield from value.parts()
    elif isinstance(value, (Box, Node)):
        yield from tensors(list(vars(value).values()))


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor of a container."""
    return next(tensors(value))


def loss_of(output: Any) -> Tensor:
    """Return the sum over the output's tensors of their mean squares, in fp32 at least."""
    parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in tensors(output)]
    return torch.stack([part.square().mean() for part in parts]).sum()


class Wraps(nn.Module):
    """Takes any container, returns one of the given kind."""

    def __init__(self, kind: str, width: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)

    def forward(self, value: Any) -> Any:
        return wrap(self.kind, self.linear(first_tensor(value)))


class ReturnsView(nn.Module):
    """Returns a view of its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, : x.shape[1]]
