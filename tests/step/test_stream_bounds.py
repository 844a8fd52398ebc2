"""Memory and reductions on streams, on ranks of NCCL with units of a usual size: bounds that hold beside torch's.

Everything is simulated: tensors have no memory, streams have clocks, and each allocation is of the pool of its stream.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
import torch.distributed.fsdp as torchs
from torch import Tensor, nn

import fsdp2
from fsdp2._torch.collectives import SymmMemReduceScatter
from fsdp2.forecasting.clock import Clock
from fsdp2.forecasting.memory import Memory
from fsdp2.forecasting.rank import simulated_rank
from tests.support import api

pytestmark = api.fsdp2_only

WIDTH, MATRICES, LAYERS = 4096, 6, 4
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16, fp32 reduce": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


class Together(torch.autograd.Function):
    """Matrices one behind the other, which make one node, as a compiled block does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        return grad, *[grad.t() @ x for _ in weights]


class Layer(nn.Module):
    """Six matrices; ``together`` their gradients appear at once."""

    def __init__(self, together: bool, width: int) -> None:
        super().__init__()
        self.together = together
        self.weights = nn.ParameterList(torch.empty(width, width) for _ in range(MATRICES))

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return Together.apply(x, *self.weights)
        for weight in self.weights:
            x = x @ weight.t()
        return x


@dataclass(frozen=True)
class Found:
    """Of one backward: what was alive at most and what pools took, beside shards, in layers; and its reductions."""

    peak: float
    pools: float
    reductions: int


def measure(
    which: ModuleType,
    ranks: int,
    policy: str,
    together: bool = False,
    lists: bool = False,
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    setter: Callable[[Any], object] = lambda unit: None,
) -> Found:
    """Return what the third backward does of ``layers``, on each of which ``setter`` was called.

    With ``lists``, each layer is told to gather the one that follows it.
    """
    clock = Clock()
    memory = Memory(lane=clock.lane)
    streams = {name: getattr(clock, name) for name in ("Stream", "Event", "current_stream", "stream")}
    with mock.patch.multiple(torch.cpu, **streams), simulated_rank({"shard": ranks}, clock) as mesh, memory:
        module = nn.Sequential(*(Layer(together, width) for _ in range(layers)))
        for unit in (*module, module):
            which.fully_shard(unit, mesh=mesh, mp_policy=which.MixedPrecisionPolicy(**POLICIES[policy]))
        for unit in module:
            setter(unit)
        for layer, following in zip(module[1:], module) if lists else ():
            layer.set_modules_to_backward_prefetch([following])  # type: ignore[operator]
        shards = sum(parameter.to_local().nbytes for parameter in module.parameters())  # type: ignore[attr-defined]
        for _ in range(3):
            loss = module(torch.empty(16, width, dtype=torch.bfloat16)).sum()
            clock.begin()
            memory.begin()
            loss.backward()
            peak, pools = memory.peak().nbytes, memory.reserved
            module.zero_grad()
        reductions = sum(span.kind == "reduce_scatter" for span in clock.spans)
        del module
    gc.collect()
    layer = MATRICES * width * width * 2  # bytes as it is computed with
    return Found((peak - shards) / layer, (pools - shards) / layer, reductions)


MOST = {"bf16": (3.1, 3.1), "bf16, fp32 reduce": (3.6, 4.2)}
"""Layers alive at most, on up to 64 ranks and where a unit leaves in one piece; beside gradients of shards."""


FP32_REDUCE = "bf16, fp32 reduce"
USUAL = (8, "bf16", True), (8, FP32_REDUCE, True), (64, FP32_REDUCE, False), (256, FP32_REDUCE, False)


@pytest.mark.parametrize(
    ("ranks", "policy", "together"),
    [
        pytest.param(*one, marks=[] if one in USUAL else pytest.mark.slow)
        for one in itertools.product((8, 64, 256, 1024), POLICIES, (False, True))
    ],
)
def test_memory_stays_half_a_layer_below_torchs(ranks, policy, together):
    """A layer and the gradients of two, or two layers and the gradients of one, are alive at once: what is reduced is
    given back before the next layer is gathered, and what is packed lies where activations and gradients were."""
    ours, theirs = measure(fsdp2, ranks, policy, together), measure(torchs, ranks, policy, together)
    shards = LAYERS / ranks * 2  # gradients of shards are float32
    assert ours.peak <= MOST[policy][together or ranks > 64] + shards
    assert ours.peak <= theirs.peak - 0.5
    assert ours.pools <= theirs.pools
    assert ours.reductions <= LAYERS * (1 if policy == "bf16" or ranks > 64 else 2)


class OwnReduceScatter:
    """A custom collective; a simulated one, which sends nothing."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Reduce, on the current stream."""


def in_symmetric_memory(unit: Any) -> None:
    """Reduce from symmetric memory."""
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_symm_mem_for_comm("NCCL")


OLD = pytest.mark.skipif(SymmMemReduceScatter is None, reason="this torch has no symmetric memory for collectives")
OWN_MEMORY = [
    pytest.param(lambda unit: unit.set_custom_reduce_scatter(OwnReduceScatter()), id="custom"),
    pytest.param(lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True), id="process group"),
    pytest.param(in_symmetric_memory, id="symmetric", marks=OLD),
]


@pytest.mark.parametrize("setter", OWN_MEMORY)
def test_gradients_in_memory_of_a_collective_do_not_add_up_over_the_model(setter):
    """A custom reduce-scatter, and those of torch that bring memory of their own, kept the full gradients of all
    layers until the end of backward: a backward through 16 layers took the memory of 18. As without them, the
    gradients of two layers are alive at most. Only layers of less than 64 MiB were kept: others give back where the
    next gather starts."""
    none = {name: lambda *unused, **named: None for name in ("set_backend", "rendezvous", "get_mem_pool")}
    pool = mock.patch.object(torch.cuda, "use_mem_pool", lambda pool: nullcontext(), create=True)
    with mock.patch.multiple(symmetric_memory, **none), pool:
        few, many = (measure(fsdp2, 64, "bf16", layers=layers, width=1024, setter=setter) for layers in (3, 8))
    assert many.peak < few.peak + 0.5


def test_with_prefetch_lists_one_layers_gradients_are_in_flight():
    """Nothing is given back for a gather ahead then, since it is there before the layer has gradients: what bounds
    memory are the bytes of what is in flight, as many as torch's. It held inputs of chunks without counting them."""
    ours, theirs = (measure(which, 8, "bf16", lists=True) for which in (fsdp2, torchs))
    assert ours.peak <= theirs.peak and ours.pools <= theirs.pools
