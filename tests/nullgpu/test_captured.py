"""Forward, backward and optimizer obey the rules of CUDA's stream capture, in every configuration that can be captured.

The null device refuses what CUDA refuses: host waits, events from outside of the capture, streams that are not joined
at its end; and work beside the capture, which CUDA would run once and never in a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.nullgpu.device import Counts
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_runs import MIXED, WIDTH, Block, over_copies, sharded
from tests.step.test_communication import Gather

INT8 = fsdp2.CompressionPolicy(torch.int8, torch.int8, torch.int8, min_numel=1024)
Build = Callable[[DeviceMesh], Any]


def blocks() -> nn.Sequential:
    """Return three blocks."""
    return nn.Sequential(*(Block() for _ in range(3)))


def of_two_axes(mesh: DeviceMesh) -> Any:
    """Return blocks that are also cut over two tensor-parallel ranks."""
    both = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
    model = blocks()
    for block in model:
        parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(both["dp"], model, mp_policy=MIXED)


def recomputed(mesh: DeviceMesh) -> Any:
    """Return blocks that backward runs again."""
    model = blocks()
    for block in model:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    return sharded(mesh, model, mp_policy=MIXED)


def compiled(mesh: DeviceMesh) -> Any:
    """Return blocks that Inductor compiles."""
    model = blocks()
    for block in model:
        block.compile()
    return sharded(mesh, model, mp_policy=MIXED)


def after(change: Callable[[Any], object], **options: Any) -> Build:
    """Return what shards blocks and calls a setter."""

    def build(mesh: DeviceMesh) -> Any:
        model = sharded(mesh, **options)
        change(model)
        return model

    return build


CONFIGURATIONS: dict[str, Build] = {
    "float32": sharded,
    "mixed": lambda mesh: sharded(mesh, mp_policy=MIXED),
    "kept": lambda mesh: sharded(mesh, reshard_after_forward=False),
    "in pairs": lambda mesh: sharded(mesh, reshard_after_forward=2),
    "last dimension": lambda mesh: sharded(mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1), mp_policy=MIXED),
    "hybrid": lambda mesh: sharded(over_copies(mesh), mp_policy=MIXED),
    "over replicas": lambda mesh: sharded(over_copies(mesh), shard_over_replicas=True),
    "compressed": lambda mesh: sharded(mesh, compression=INT8),
    "compressed, hybrid": lambda mesh: sharded(over_copies(mesh), compression=INT8, mp_policy=MIXED),
    "alone": lambda mesh: sharded(mesh, mp_policy=MIXED),
    "tensor parallel": of_two_axes,
    "recomputed": recomputed,
    "compiled": compiled,
    "custom gathers": after(lambda model: model.set_custom_all_gather(Gather(), recurse=True)),
    "memory of NCCL": after(lambda model: model.set_allocate_memory_from_process_group_for_comm(True), mp_policy=MIXED),
    "hooked": after(lambda model: model.set_all_reduce_hook(lambda g: g.mul_(1), recurse=True), mp_policy=MIXED),
    "a part unused": after(lambda model: model.set_reduce_scatter_unused_params(True)),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True),
    "plain shards": lambda p: fsdp2.use_local_shards(torch.optim.AdamW(p, lr=0.1, capturable=True)),
}


Backward = Callable[[Any, torch.Tensor], object]


def backward(model: Any, rows: torch.Tensor) -> None:
    """Fill the gradients."""
    model(rows).float().sum().backward()


def micro_batches(model: Any, rows: torch.Tensor) -> None:
    """Fill them by three backwards, of which the last one reduces."""
    with fsdp2.no_sync(model):
        backward(model, rows)
        backward(model, rows)
    backward(model, rows)


def clipped(model: Any, rows: torch.Tensor) -> None:
    """Fill and clip them."""
    backward(model, rows)
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)


def evaluated(model: Any, rows: torch.Tensor) -> None:
    """Evaluate before."""
    with torch.no_grad():
        model(rows)
    backward(model, rows)


def by_hand(model: Any, rows: torch.Tensor) -> None:
    """Gather ahead, and end backward by hand."""
    model[1].unshard(async_op=True)
    model.set_manual_backward_finalization(True)
    backward(model, rows)
    model.finalize_backward(async_op=True).wait()


def capture(build: Build, optimizer_of: Callable[..., Any], fill: Backward = backward, world: int = 8) -> None:
    """Train as torch says that one must before a capture, then capture a step, and replay it."""
    with ranks(world) as mesh:
        model = build(mesh)
        model.set_keep_unsharded_storage(True)
        optimizer, rows = optimizer_of(model.parameters()), torch.zeros(8, WIDTH)

        def step() -> None:
            fill(model, rows)
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


def test_state_on_the_host_is_not_captured():
    """The host waits in such a step; the error says so before anything is captured, and the step works outside."""
    parameter = nn.Parameter(torch.ones(64, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = fsdp2.offload_optimizer_state(torch.optim.AdamW([parameter], capturable=True))
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="AdamW.step is captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_steps(name, optimizer):
    """A step of each configuration is captured and replayed."""
    if (name, optimizer) == ("tensor parallel", "adamw"):
        pytest.skip(
            "torch's capturable AdamW divides lists of DTensors, which must be on one mesh; norms are on another"
        )
    capture(CONFIGURATIONS[name], OPTIMIZERS[optimizer], world=1 if name == "alone" else 8)


@pytest.mark.parametrize("name", ["mixed", "hybrid", "over replicas"])
@pytest.mark.parametrize("fill", [micro_batches, clipped, evaluated, by_hand])
def test_more_in_a_step(name, fill):
    """So is one that does more than a backward."""
    capture(CONFIGURATIONS[name], OPTIMIZERS["sgd"], fill)


def test_a_host_wait_in_a_captured_step():
    """A program that looks at its gradients is refused."""

    def looks(model: Any, rows: torch.Tensor) -> None:
        backward(model, rows)
        model[0].up.bias.grad.to_local().sum().item()

    with pytest.raises(RuntimeError, match="capturing"):
        capture(sharded, OPTIMIZERS["sgd"], looks)
    torch.cuda.synchronize()


@pytest.mark.parametrize("over_replicas", [False, True])
def test_shards_on_the_host(over_replicas):
    """So are shards on the host, which waits for copies of them; the error says that before anything is captured."""

    def offloaded(mesh: DeviceMesh) -> Any:
        mesh = over_copies(mesh) if over_replicas else mesh
        return sharded(mesh, offload_policy=fsdp2.CPUOffloadPolicy(), shard_over_replicas=over_replicas)

    with pytest.raises(RuntimeError, match="CPUOffloadPolicy keeps the shards on the host"):
        capture(offloaded, OPTIMIZERS["sgd"])
    torch.cuda.synchronize()


def test_work_beside_a_captured_step():
    """And a program that uses a stream of its own without a wait."""
    beside, scratch = torch.cuda.Stream(), torch.zeros(4, device="cuda")

    def beside_it(model: Any, rows: torch.Tensor) -> None:
        backward(model, rows)
        with torch.cuda.stream(beside):
            scratch.add_(1)

    with pytest.raises(RuntimeError, match="outside of the capture"):
        capture(sharded, OPTIMIZERS["sgd"], beside_it)
    torch.cuda.synchronize()
