"""Every rank launches the same collectives in the same order, whatever order autograd finishes its gradients in.

NCCL pairs collectives by their order alone: two ranks that launch them in different orders hang, or sum what does not
belong together.
"""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._torch.autograd import accumulate_grad_node
from fsdp2._torch.forecast import operator_arguments, unboxed_group
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.cost import tensors_in
from fsdp2.tools.forecast.rank import simulated_rank
from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.fake import fake_mesh
from tests.support.streams import Device

pytestmark = api.fsdp2_only

Step = tuple[str, str, int, torch.dtype, str]
"""Communicator, operator, elements, dtype and lane."""
WIDTH, BRANCHES, RANKS = 64, 3, 4
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Recorded(TorchDispatchMode):
    """Notes each collective with its communicator and the lane that it is put on."""

    def __init__(self, clock: Clock, mesh: Any) -> None:
        super().__init__()
        self.clock, self.steps = clock, list[Step]()
        self.names = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            place = [argument.name for argument in operator_arguments(func)].index("process_group")
            tensors, name = tensors_in(args), self.names[unboxed_group(args[place]).group_name]
            numel = sum(tensor.numel() for tensor in tensors)
            self.steps.append((name, str(func), numel, tensors[0].dtype, self.clock.current_stream().name))
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Branches of different sizes side by side, taken in an order of its own; so their gradients are finished."""

    def __init__(self, order: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH * (1 + i), dtype=dtype) for i in range(BRANCHES))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.order = order.sample(range(BRANCHES), BRANCHES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [self.branches[i](y).unflatten(-1, (-1, WIDTH)).sum(-2) for i in self.order]
        return x + torch.stack(parts).sum(0)


class Model(nn.Module):
    """Layers that are units under a root; with ``recompute`` backward runs them again."""

    def __init__(self, order: random.Random, recompute: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(order, dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x).float().square().mean()


def train(model: Any) -> None:
    """Run a step of two micro-batches, an evaluation, and a step that first reduces without an all-reduce."""
    x = torch.empty(2, WIDTH)
    model.set_requires_gradient_sync(False)
    model(x).backward()
    model.set_requires_gradient_sync(True)
    model(x).backward()
    with torch.no_grad():
        model(x)
    model.set_requires_all_reduce(False)
    model(x).backward()
    model.set_requires_all_reduce(True)
    model(x).backward()


SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": MIXED},
    "kept": {"reshard_after_forward": False, "mp_policy": MIXED},
    "last dimension": {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
    "hybrid": {"mp_policy": MIXED},
    "recomputed": {"mp_policy": MIXED},
    "listed": {},
}


OTHERS = [pytest.param(*one, marks=pytest.mark.slow) for one in (("mixed", "direct"), ("hybrid", "packed"))]
CASES = [*zip(SETUPS, cycle(reversed(TRANSFERS)), strict=False), *OTHERS]


def sequence(rank: int, setup: str, transfer: str) -> tuple[list[Step], list[list[int]]]:
    """Return what one rank launches, and in which orders it takes the branches."""
    clock, order = Clock(), random.Random(rank)
    sizes = {"replicate": 2, "shard": RANKS // 2} if setup == "hybrid" else {"shard": RANKS}
    with simulated_rank(sizes, clock, rank=rank) as mesh:
        model: Any = Model(order, setup == "recomputed")
        for unit in (*model.layers, model):
            fsdp2.fully_shard(unit, mesh=mesh, **SETUPS[setup])
        model.set_transfer_sizes(**TRANSFERS[transfer])
        if setup == "listed":
            for before, after in zip(model.layers, model.layers[1:], strict=False):
                before.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([before])
        with Recorded(clock, mesh) as recorded:
            train(model)
        return recorded.steps, [layer.order for layer in model.layers]


@pytest.mark.parametrize(("setup", "transfer"), CASES)
def test_every_rank_launches_the_same(setup, transfer):
    """In the same order, of the same sizes, on the same lanes."""
    expected, first = sequence(0, setup, transfer)
    assert len(expected) > 20
    steps, order = sequence(RANKS - 1, setup, transfer)
    assert order != first
    assert steps == expected


# ---- steps on changing streams ----


def steps_on(device: Device, model: Any, first: Any, second: Any) -> None:
    """Run a step on one compute stream, one on another that waits for the first, and one on the first again."""
    for stream, before in ((first, None), (second, first), (first, second)):
        if before is not None:
            stream.wait_event(before.record_event())
        with device.stream(stream):
            model(torch.zeros(2, WIDTH)).backward()
            model.zero_grad()


@pytest.mark.parametrize("setup", ["fp32", "hybrid"])
def test_another_compute_stream(setup, monkeypatch):
    """Warming up on one stream and going on on another, as graphs are captured, leaves nothing behind on the first.

    Autograd runs a node on the stream that it was made on. So nodes that somebody kept from the first iteration call
    hooks on a stream that no longer computes anything.
    """
    options = SETUPS[setup]
    with fake_mesh(RANKS) as mesh, Device() as device:
        if setup == "hybrid":
            names = ("replicate", "shard")
            mesh = torch.distributed.init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=names)
        monkeypatch.setattr("fsdp2.engine.gradients.hook_gradient", on_the_stream_of_its_node(device))
        model: Any = Model(random.Random(0), recompute=False)
        for unit in (*model.layers, model):
            fsdp2.fully_shard(unit, mesh=mesh, **options)
        model.set_transfer_sizes(**TRANSFERS["direct"])
        steps_on(device, model, device.compute, device.Stream())
    assert not device.mistakes


def on_the_stream_of_its_node(device: Device) -> Any:
    """Return a ``hook_gradient`` that keeps nodes; its hooks run where a device runs them, on the node's stream."""
    from fsdp2.autograd.hooks import hook_gradient

    kept: list[Any] = []

    def hook(full: Tensor, ready: Any) -> Any:
        def called(tensor: Tensor) -> None:
            kept.append(accumulate_grad_node(full))
            with device.stream(kept[-1].metadata.setdefault("stream", device.current_stream())):
                ready(tensor)

        return hook_gradient(full, called)

    return hook


def test_no_node_is_kept_over_iterations():
    """Each forward makes the nodes that its backward goes through."""
    with fake_mesh(RANKS) as mesh:
        model: Any = Model(random.Random(0), recompute=False)
        for unit in (*model.layers, model):
            fsdp2.fully_shard(unit, mesh=mesh)
        for _ in range(3):
            loss = model(torch.zeros(2, WIDTH))
            fulls = [parameter for unit in (*model.layers, model) for parameter in fulls_of(unit)]
            nodes = [accumulate_grad_node(full) for full in fulls]
            assert nodes and not any(node.metadata for node in nodes)
            for node in nodes:
                node.metadata["iteration"] = "an earlier one"
            loss.backward()
            del loss, node, nodes


def fulls_of(unit: Any) -> list[Tensor]:
    """Return the full parameters of a unit."""
    return [p.full for group in unit._get_fsdp_state().groups for p in group.params if p.full is not None]
