"""The models that are trained: small ones, which show whether results are right, and one of a real size."""

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
        """Return ``x`` plus what the block adds."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Small(nn.Module):
    """Blocks that are units, and a head that is the root's.

    ``recomputed`` runs the blocks again in backward. ``skipped`` names blocks that this rank does not run.
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
        return self.head(x)  # type: ignore[no-any-return]


def tied() -> Small:
    """Return a model whose first block has its matrix in common with the last one, which is another unit."""
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
        """Return ``x`` plus what the block adds."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Blocks that are units, and a norm that is the root's."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width, max(width // 64, 1)) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()  # type: ignore[no-any-return]
