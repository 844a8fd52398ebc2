"""A small byte-level GPT in plain PyTorch. Nothing in this file depends on sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256  # the vocabulary: one token is one byte


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. They are stored in checkpoints, so a resumed run need not repeat them."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Input and output are [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer layer. Input and output are [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Computes logits [batch, time, 256] of the next byte from bytes [batch, time] (int64)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        cos, sin = _rotary_table(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        x = self.embed(tokens)
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def _initialise(self) -> None:
        """Initialize weights as in GPT-2: the deeper the model, the smaller those that write to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.out.weight", "down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte, computed in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [context, head_width / 2] of rotary position embeddings (Su et al., 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [batch, heads, time, head_width] with each pair of channels rotated by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
