"""Small models of every kind, each as a ``Case``: how to build it, what to feed it, which parts become units.

The parameters come from the generator that the caller seeds, so two builds with one seed are equal. Inputs have their
rows first, and every loss is a mean over rows: the mean over ranks of equal slices is the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import shapes

ROWS = 12
"""Rows of a whole batch: divisible by every world size."""

Unit = nn.Module | list[nn.Module]


@dataclass(frozen=True)
class Case:
    """One model. ``torch_takes_it`` is False where torch's fully_shard refuses; ``rows_couple`` where a row's result
    depends on the other rows of its rank (BatchNorm), so that no full-batch run is equal, ``low_precision`` where some
    parameters have few bits of their own."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    units: Callable[[Any], list[Unit]] = lambda model: []
    keywords: Callable[[tuple[Any, ...]], dict[str, Any]] | None = None
    torch_takes_it: bool = True
    rows_couple: bool = False
    low_precision: bool = False

    def call(self, model: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Return the model's output, inputs passed as keywords if the case says so."""
        return model(**self.keywords(inputs)) if self.keywords else model(*inputs)


def rows(*width: int, grad: bool = False) -> Callable[[int], tuple[Tensor]]:
    """Return a maker of one float input of ``ROWS`` rows; the argument of the maker is the step."""

    def make(step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        return (torch.randn(ROWS, *width, generator=generator).requires_grad_(grad),)

    return make


def tokens(length: int, vocabulary: int) -> Callable[[int], tuple[Tensor]]:
    """Return a maker of token rows."""

    def make(step: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(2000 + step)
        return (torch.randint(vocabulary, (ROWS, length), generator=generator),)

    return make


def children(model: nn.Module) -> list[Unit]:
    """Every direct child is a unit."""
    return list(model.children())


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers of these widths with tanh between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(width_in, width_out, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def linears(model: nn.Module) -> list[Unit]:
    """Every Linear is a unit."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


class Block(nn.Module):
    """A pre-norm transformer block with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tied token embedding and head around a stack of blocks; its input needs no gradient."""

    def __init__(self, layers: int = 2, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embed(indices)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Through(nn.Module):
    """Two linear layers around a middle of any kind."""

    def __init__(self, middle: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = middle
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(shapes.first_tensor(self.middle(torch.tanh(self.first(x)))))


class Three(nn.Module):
    """Three layers of eight features with tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Layers(nn.Sequential):
    """Layers of eight features with tanh between them; a forward runs those in ``used``, or those that it is told."""

    def __init__(self, count: int = 3) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(count)))
        self.used: Sequence[int] = range(count)

    def forward(self, x: Tensor, used: Sequence[int] | None = None) -> Tensor:
        first, *others = self.used if used is None else used
        x = self[first](x)
        for index in others:
            x = self[index](torch.tanh(x))
        return x


class Counting(nn.Module):
    """A running buffer that only depends on the number of calls, and a non-persistent one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((6,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight + self.shift.to(x.dtype)


class Odd(nn.Module):
    """Parameters of unusual kinds, added to the input's columns."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters(recurse=False):
            value = parameter.to(x.dtype)
            x = (
                x * value
                if parameter.ndim == 0
                else x + torch.tanh(value.flatten()[:6].sum()) * torch.tanh(value.flatten()[-1])
            )
        return x


class Image(nn.Module):
    """Convolutions in channels_last memory format: their weights are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.contiguous(memory_format=torch.channels_last))))


class Transposed(nn.Module):
    """A weight that is the transpose of a contiguous tensor, and one with a gap between its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.gapped = nn.Parameter(torch.randn(6, 9)[:, :4])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.turned), self.gapped)


class MixedDtypes(nn.Module):
    """Trainable parameters of three dtypes and frozen ones of two more in one unit."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.in_single = nn.Parameter(torch.randn(6, 6))
        self.in_double = nn.Parameter(torch.randn(6, dtype=torch.float64), requires_grad=trainable)
        self.in_half = nn.Parameter(torch.randn(6, 3).bfloat16(), requires_grad=trainable)
        self.steps = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.in_single) * self.in_double.to(x.dtype) + self.in_half.to(x.dtype).sum(1)
        return x * self.steps.sum() / 10 + self.flags.sum()


class Tied(nn.Module):
    """Two layers of one unit share their weight; one of them is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Recurrent(nn.Module):
    """One unit called three times in a forward, the last time under its other name."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = mlp(6, 7, 6)
        self.alias = self.cell
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.cell(x)
        return self.last(self.alias(x))


class Frozen(nn.Module):
    """A frozen unit below, between and inside trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        for index in (0, 2):
            self.layers[index].requires_grad_(False)
        self.layers[3].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Skipping(nn.Module):
    """Every second call leaves one unit out, and one unit is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        self.calls += 1
        return self.sometimes(torch.tanh(x)) if self.calls % 2 else x


class Constant(nn.Module):
    """A unit without inputs: its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self) -> Tensor:
        return self.table.square()


class UsesConstant(nn.Module):
    """Multiplies its input with what a unit without inputs returns."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = Constant()
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.constant())


class Table(nn.Module):
    """Returns its weight, views of it and its bias, which are used when other units have run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6))

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self.weight, {"turned": self.weight.t(), "fixed": self.bias.detach(), "bias": self.bias}


class UsesTable(nn.Module):
    """Computes with the parameters that a unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = Table(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight, views = self.table()
        x = self.last(x)
        return (x @ weight * views["bias"]) @ views["turned"] + views["fixed"]


class ViewInPlace(nn.Module):
    """A unit returns a view of its result, which the caller then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), shapes.ReturnsView(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.first(x)))
        y += x
        y.mul_(2)
        return self.last(y)


class Keywords(nn.Module):
    """Takes its input by keyword, with flags and None beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, *, x: Tensor, twice: bool, mask: None = None) -> Tensor:
        y = self.one(input=x)
        return self.two(input=y) * (2 if twice and mask is None else 1)


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(6)), "b": nn.Parameter(torch.randn(1, 6))})

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.several:
            x = x * parameter
        return x + self.named["a"] + self.named["b"]


class Casting(nn.Linear):
    """Casts its input to the dtype of its weight by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))
