"""The models that are measured: a chain of square matrices, a nine-parameter block, and a small GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def chain(layers: int, width: int, matrices: int = 6) -> nn.Sequential:
    """`layers` layers, each `matrices` bias-free `width` x `width` matrices applied one after the other."""

    def layer() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(matrices)))

    return nn.Sequential(*(layer() for _ in range(layers)))


class SideBySide(nn.Sequential):
    """Its layers are each applied to the data itself; the outputs are added."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self]).sum(0)


class Block(nn.Module):
    """A llama-shaped block without the attention product: two norms and seven bias-free matrices (9 parameters)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.out(self.query(h) * self.key(h) + self.value(h))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Columns(nn.Module):
    """Nine parameters of `rows` x 1, added to the input: work that does not grow with the number of ranks."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.columns = nn.ParameterList(nn.Parameter(torch.ones(rows, 1)) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for column in self.columns:
            x = x + column
        return x


class Attention(nn.Module):
    """Causal self-attention with one fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GPTLayer(nn.Module):
    """Attention and a four times wider feed-forward part, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A byte-level GPT; returns the mean cross-entropy of the next byte."""

    def __init__(self, width: int, layers: int, length: int, heads: int = 8, symbols: int = 256) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(GPTLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
