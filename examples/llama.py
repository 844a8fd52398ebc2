"""A llama-style language model, and its tensor-parallel plan. Nothing in this file depends on FSDP."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model."""

    vocabulary: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Tensor parallelism may split its heads over ranks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward of llama."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, hidden = config.width, 3 * config.width
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.width), Attention(config)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(config.width), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Logits [batch, time, vocabulary] of the next token, from tokens [batch, time] (int64)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Shard the matrices of ``model`` over the 1D ``mesh``, and the sequence dimension between them; return ``model``.

    The logits are a DTensor sharded along the vocabulary, which ``next_token_loss`` accepts.
    """
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    gather_sequence = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": gather_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gather_sequence,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)  # type: ignore[arg-type]  # styles of several classes
    return model


def loss_context(parallel: bool) -> AbstractContextManager[None]:
    """Return the context for loss and backward. If ``parallel``, logits are never gathered along the vocabulary."""
    return loss_parallel() if parallel else nullcontext()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(x: Tensor) -> Tensor:
    """Return ``x`` [batch, heads, time, head_width] with each pair of channels rotated by its position's angle."""
    time, width = x.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(time, device=x.device), frequencies).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)
