"""Forward, backward and optimizer obey the rules of CUDA's stream capture, in every configuration that can be captured.

The null device refuses what CUDA refuses: host waits, events from outside of the capture, streams that are not joined
at its end; and work beside the capture, which CUDA would run once and never in a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp2
from tests.nullgpu.device import Counts
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_runs import MIXED, WIDTH, over_copies, sharded

INT8 = fsdp2.CompressionPolicy(torch.int8, torch.int8, torch.int8, min_numel=1024)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "mixed": {"mp_policy": MIXED},
    "kept": {"reshard_after_forward": False},
    "in pairs": {"reshard_after_forward": 2},
    "hybrid": {"copies": True, "mp_policy": MIXED},
    "over replicas": {"copies": True, "shard_over_replicas": True},
    "compressed": {"compression": INT8},
    "alone": {"world": 1, "mp_policy": MIXED},
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True),
    "plain shards": lambda p: fsdp2.use_local_shards(torch.optim.AdamW(p, lr=0.1, capturable=True)),
}


def capture(options: dict[str, Any], optimizer_of: Callable[..., Any], act: Callable[[Any], object]) -> None:
    """Train as torch says that one must before a capture, then capture a step, and replay it."""
    options = dict(options)
    with ranks(options.pop("world", 8)) as mesh:
        model = sharded(over_copies(mesh) if options.pop("copies", False) else mesh, **options)
        model.set_keep_unsharded_storage(True)
        optimizer, rows = optimizer_of(model.parameters()), torch.zeros(8, WIDTH)

        def step() -> None:
            model(rows).float().sum().backward()
            act(model)
            optimizer.step()
            optimizer.zero_grad()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with Counts() as counts, torch.cuda.graph(graph):
            step()
        assert counts["graph_nodes"] > 50
        with Counts() as counts:
            graph.replay()
        assert counts["graph_launches"] == 1 and not counts["kernels"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_steps(name, optimizer):
    """A step of each configuration is captured and replayed."""
    capture(CONFIGURATIONS[name], OPTIMIZERS[optimizer], lambda model: None)


def test_a_host_wait_in_a_captured_step():
    """A program that looks at its gradients is refused."""
    look = lambda model: model[0].up.bias.grad.to_local().sum().item()
    with pytest.raises(RuntimeError, match="capturing"):
        capture({}, OPTIMIZERS["sgd"], look)
    torch.cuda.synchronize()


def test_work_beside_a_captured_step():
    """And one that uses a stream of its own without a wait."""
    beside, scratch = torch.cuda.Stream(), torch.zeros(4, device="cuda")

    def act(model: Any) -> None:
        with torch.cuda.stream(beside):
            scratch.add_(1)

    with pytest.raises(RuntimeError, match="outside of the capture"):
        capture({}, OPTIMIZERS["sgd"], act)
    torch.cuda.synchronize()
