"""The models: small ones to check results, and one of a real size to measure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Attention", "Block", "Decoder", "Small", "tied"]


class Block(nn.Module):
    """A feed-forward with a norm and a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the output of the feed-forward."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]  # calls of modules are untyped


class Small(nn.Module):
    """Blocks, which become units, and a head, which stays with the root.

    ``recomputed`` runs the blocks again in backward. ``skipped`` has the indices of blocks that this rank does not run.
    """

    def __init__(self, width: int = 64, inner: int = 128, blocks: int = 3, outputs: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, outputs)
        self.width = width
        self.recomputed = False
        self.skipped: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs."""
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x)  # type: ignore[no-any-return]  # calls of modules are untyped


def tied() -> Small:
    """Return a model whose first and last block, two units, share a matrix."""
    model = Small()
    first, last = model.blocks[0], model.blocks[-1]
    assert isinstance(first, Block) and isinstance(last, Block)
    last.up.weight = first.up.weight
    return model


class Attention(nn.Module):
    """A block of a decoder: causal attention and a feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, tokens, width) plus the outputs of attention and feed-forward."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]  # calls of modules are untyped


class Decoder(nn.Module):
    """Blocks, which become units, and a norm, which stays with the root."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width, max(width // 64, 1)) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()  # type: ignore[no-any-return]  # calls of modules are untyped
