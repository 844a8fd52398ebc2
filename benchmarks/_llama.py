"""Layers of real models, whose shapes are all that a simulated step needs: dense ones, experts, and compiled blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.tools.forecast.clock import Clock


@dataclass(frozen=True)
class Shape:
    """One layer's sizes; with ``experts`` its feed-forward is that many, ``active`` for a token."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 0

    @property
    def numel(self) -> int:
        """Elements of the parameters of one layer."""
        keys = self.width // self.heads * self.kv_heads
        feed = 3 * self.width * self.hidden * max(self.experts, 1) + self.width * self.experts
        return 2 * self.width * (self.width + keys) + feed + 2 * self.width


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8),
    "13b": Shape(5120, 13824, 40, 40),
    "70b": Shape(8192, 28672, 64, 8),
    "moe": Shape(2048, 768, 32, 4, experts=128, active=8),
}


VOCABULARY = 128256
"""Llama 3's."""


class Attention(nn.Module):
    """Causal attention whose keys and values are shared by several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, keys = shape.width // shape.heads, shape.width // shape.heads * shape.kv_heads
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Feed-forwards side by side, each for an equal part of the tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class Routed(nn.Module):
    """A router and the experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.active, self.count = shape.active, shape.experts
        self.router, self.experts = nn.Linear(shape.width, shape.experts, bias=False), Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight = self.router(flat).softmax(-1)[:, : self.active]
        routed = flat.repeat(self.active, 1).view(self.count, -1, flat.shape[-1])
        out = self.experts(routed).view(self.active, *flat.shape)
        return (out * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Block(nn.Module):
    """One layer. Its norms are torch's layer norms without bias, which are one kernel everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.width, bias=False) for _ in range(2))
        self.attention = Attention(shape)
        self.feed = Routed(shape) if shape.experts else FeedForward(shape.width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Language(nn.Module):
    """Blocks between an embedding and a projection to a vocabulary."""

    def __init__(self, shape: Shape, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, shape.width), nn.ModuleList(blocks)
        self.norm, self.output = nn.LayerNorm(shape.width, bias=False), nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class Compiled(nn.Module):
    """A block as torch.compile leaves it: one node of autograd, so that all gradients appear at once.

    It saves its inputs alone. Its other activations are made again in backward, where no time passes for them; so they
    are in memory in the backward of their own block only.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        names, values = zip(*self.block.named_parameters(), strict=True)
        return _Graph.apply(self.block, names, x, *values)


class _Graph(torch.autograd.Function):
    """A block whose forward makes one node. The graph that backward needs is made there, while no time passes."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, names: Any, *inputs: Tensor) -> Tensor:
        ctx.block, ctx.names, ctx.inputs = block, names, [value.detach() for value in inputs]
        return _called(ctx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        clock = running_on[-1]
        clock.stopped = True
        with torch.enable_grad():
            ctx.inputs = [value.requires_grad_() for value in ctx.inputs]
            output = _called(ctx)
        clock.stopped = False
        return (None, None, *torch.autograd.grad(output, ctx.inputs, grad))


def _called(ctx: Any) -> Tensor:
    x, *values = ctx.inputs
    return torch.func.functional_call(ctx.block, dict(zip(ctx.names, values, strict=True)), (x,))


running_on: list[Clock] = []
"""The last one times what runs."""
