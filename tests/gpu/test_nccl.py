"""Training on GPUs with NCCL; the same bodies run on CPUs with gloo, where streams do nothing.

Ranks share a GPU if there are fewer (``devices.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.func import functional_call
from torch.testing import assert_close

from fsdp2 import fully_shard
from fsdp2.comm.streams import Lane
from fsdp2.tools.check.strict import LiveBytes, settled
from tests.gpu.devices import on_devices, places
from tests.step.test_teachers import Momentum, units
from tests.support import api, host_parts
from tests.support.cases import TRANSFERS
from tests.support.fake import fake_mesh

pytestmark = api.fsdp2_only
STEPS, ROWS, LR = 5, 8, 0.01
WARM_UP = 3
FULL = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
policies = pytest.mark.parametrize("policy", [FULL, MIXED], ids=["fp32", "mixed"])
transfers = pytest.mark.parametrize("transfer", TRANSFERS)


class Layer(nn.Module):
    """Large matrices, and an odd one whose shards are no multiple of 16 bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.odd = nn.Linear(width, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) + self.odd(y).mean(-1, keepdim=True)


class Net(nn.Module):
    """Layers that are units, and a head that is the root's; returns the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def build(device: str, width: int = 32, layers: int = 3) -> Net:
    """Return a model that is the same on every device."""
    torch.manual_seed(3)
    return Net(width, layers).to(device)


def shard(model: Net, mesh: DeviceMesh, implementation: Any = api.ours, transfer: str = "", **options: Any) -> Any:
    """Shard the layers and the root in place."""
    for module in (*model.layers, model):
        implementation.fully_shard(module, mesh=mesh, **options)
    if transfer:
        model.set_transfer_sizes(**TRANSFERS[transfer])
    return model


def rows(model: Any, step: int, rank: int, world: int, device: str) -> Tensor:
    """Return this rank's rows of a step's batch, as wide as the model."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, model.head.in_features, generator=generator).chunk(world)[rank].to(device)


def train(model: Any, rank: int, world: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses and what the model holds of its parameters after some steps."""
    # The gradient of the head grows with its width: with one rate for all, a wide model's weights become NaN.
    rate = LR * min(1.0, 128 / model.head.in_features)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = model(rows(model, step, rank, world, device))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.to_local().clone() for parameter in model.parameters()]


class Alone(nn.Module):
    """A model that is not sharded, computing in a policy's dtype, its parameters cast for each forward."""

    def __init__(self, model: Net, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.dtype is None:
            return self.model(x)
        low = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, low, (x.to(self.dtype),))


def train_alone(device: str, policy: MixedPrecisionPolicy) -> list[Tensor]:
    """Return the parameters after the same steps on the whole batch in one process."""
    model = Alone(build(device), policy.param_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        model(rows(model.model, step, 0, 1, device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@policies
@transfers
@pytest.mark.parametrize("replicas", [False, True])
@on_devices(1, 2, 4)
def test_parity(rank, world, device, policy, transfer, replicas):
    """Losses and parameters are torch's, and those of a single process on the whole batch; also as mere replicas."""
    names = ("replicate", "shard")
    copies = min(world, 2) if replicas else 1
    mesh = init_device_mesh(device, (copies, world // copies), mesh_dim_names=names)
    ours = shard(build(device), mesh, transfer=transfer, mp_policy=policy)
    theirs = shard(build(device), mesh, api.theirs, mp_policy=policy)
    losses, found = train(ours, rank, world, device)
    expected_losses, expected = train(theirs, rank, world, device)
    exact = policy.param_dtype is None
    close = {} if exact else {"rtol": 2e-3, "atol": 2e-4}
    assert_close(losses, expected_losses, **close)
    assert_close(found, expected, **close)
    whole = [parameter.full_tensor() for parameter in ours.parameters()]
    assert_close(
        whole, train_alone(device, policy), **({} if policy.param_dtype is None else {"rtol": 2e-2, "atol": 5e-3})
    )


class Inline(Lane):
    """A lane that is the stream everything else runs on, and waits for each collective before it goes on."""

    def __init__(self, device: str) -> None:
        stream = torch.cuda.current_stream() if device == "cuda" else None
        super().__init__(torch.device(device), stream=stream)
        self.async_op = False  # nothing runs beside the host


def inline_lanes(model: Any, device: str) -> Any:
    """Let everything of ``model``, which has not run yet, happen on the current stream."""
    lanes = model._get_fsdp_state().root.comm.lanes
    lanes.gather, lanes.pack, lanes.reduce, lanes.replicate = (Inline(device) for _ in range(4))
    return model


def assert_lanes_do_not_race(mesh: DeviceMesh, rank: int, world: int, device: str, **options: Any) -> None:
    """Assert that training is bit for bit what it is when nothing can happen at the same time."""
    width = 2048 if device == "cuda" else 128
    several = shard(build(device, width, 6), mesh, **options)
    single = inline_lanes(shard(build(device, width, 6), mesh, **options), device)
    found, expected = (train(model, rank, world, device) for model in (several, single))
    assert all(value.isfinite().all() for part in expected for value in part)
    assert_close(found, expected, rtol=0, atol=0)
    if device == "cuda":
        lanes = several._get_fsdp_state().root.comm.lanes
        streams = {lane._stream for lane in (lanes.gather, lanes.pack, lanes.reduce, lanes.replicate)}
        assert torch.cuda.current_stream() not in streams and len(streams) == 4


@policies
@transfers
@pytest.mark.parametrize("reshard", [True, False])
@on_devices(1, 2)
def test_lanes_do_not_race(rank, world, device, policy, transfer, reshard):
    """Gathers ahead, reductions behind and memory given back in between: the result is that of one stream."""
    mesh = init_device_mesh(device, (world,))
    options = {"transfer": transfer, "mp_policy": policy, "reshard_after_forward": reshard}
    assert_lanes_do_not_race(mesh, rank, world, device, **options)


@on_devices(2)
def test_replicate_lane_does_not_race(rank, world, device):
    """The all-reduce of replicas runs on a lane of its own."""
    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("replicate", "shard"))
    assert_lanes_do_not_race(mesh, rank, world, device, transfer="direct")


@transfers
@on_devices(1, 2)
def test_offload(rank, world, device, transfer):
    """Shards and gradients live on the CPU, shards in page-locked memory if there is a GPU; results are the same."""
    mesh = init_device_mesh(device, (world,))
    policy = CPUOffloadPolicy(pin_memory=True)
    offloaded, usual = (shard(build(device), mesh, transfer=transfer, **o) for o in ({"offload_policy": policy}, {}))
    for model in (offloaded, usual):
        model(rows(model, 0, rank, world, device)).backward()
    for mine, reference in zip(offloaded.parameters(), usual.parameters(), strict=True):
        assert mine.device.type == mine.grad.device.type == "cpu"
        assert mine.to_local().is_pinned() is (device == "cuda") or not mine.to_local().numel()
        assert torch.equal(mine.grad.to_local(), reference.grad.to_local().cpu())
    offloaded.zero_grad()
    usual.zero_grad()
    found, expected = (train(model, rank, world, device) for model in (offloaded, usual))
    assert_close(found[0], expected[0])
    assert_close(found[1], [local.cpu() for local in expected[1]])


@transfers
@on_devices(1, 2)
def test_all_reduce_hook(rank, world, device, transfer):
    """The hook changes reduced gradients on the stream that it was given, and what follows waits for it."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    seen = []

    def triple(reduced: Tensor) -> None:
        seen.append(None if stream is None else torch.cuda.current_stream())
        for _ in range(100):  # long enough to be overtaken
            reduced.mul_(2).div_(2)
        reduced.mul_(3)

    mesh = init_device_mesh(device, (world,))
    hooked, usual = (shard(build(device), mesh, transfer=transfer) for _ in range(2))
    for module in (*hooked.layers, hooked):
        module.set_all_reduce_hook(triple, stream=stream)
    for model in (hooked, usual):
        model(rows(model, 0, rank, world, device)).backward()
    for mine, reference in zip(hooked.parameters(), usual.parameters(), strict=True):
        assert_close(mine.grad.to_local(), 3 * reference.grad.to_local())
    assert len(seen) >= len(hooked.layers) + 1 and set(seen) == {stream}


def assert_nothing_is_left(model: Any, rank: int, world: int, device: str) -> None:
    """Assert that after a training step exactly the bytes are alive that were before it."""

    def step() -> None:
        loss = model(rows(model, 0, rank, world, device))
        loss.backward()
        model.zero_grad()

    for _ in range(2):
        step()
    if device == "cpu":
        with LiveBytes(model.parameters()) as live:
            rest = live.now
            step()
            assert settled(lambda: live.now, at_most=rest) <= rest
        return
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == rest


@transfers
@on_devices(1, 2)
def test_memory_after_a_step(rank, world, device, transfer):
    """A step leaves nothing behind, on whatever lane it was allocated."""
    model = shard(build(device, 64), init_device_mesh(device, (world,)), transfer=transfer)
    assert_nothing_is_left(model, rank, world, device)


@contextmanager
def pretended(device: str, world: int = 8) -> Iterator[DeviceMesh]:
    """Yield a mesh of ``world`` ranks of which seven are pretended."""
    with fake_mesh(world):
        yield init_device_mesh(device, (world,))


@pytest.mark.parametrize(("world", "device"), places(1))
@policies
@transfers
def test_pretended_ranks(world, device, policy, transfer):
    """Eight ranks on one device: training goes through and its memory comes back; its numbers mean nothing."""
    with pretended(device) as mesh:
        model = shard(build(device), mesh, transfer=transfer, mp_policy=policy)
        assert_nothing_is_left(model, 0, 8, device)
        loss = model(rows(model, 0, 0, 8, device))
        loss.backward()
        for parameter in model.parameters():
            assert parameter.device.type == device
            assert parameter.grad.to_local().shape == parameter.to_local().shape


@on_devices(1, 2)
def test_a_teacher_that_is_written_without_a_trace(rank, world, device):
    """A CPU gathers it again; a GPU finds it later, and the host waits for nothing meanwhile."""
    model = Momentum("by_data", True, False).to(device)
    mesh = init_device_mesh(device, (world,))
    for unit in [*units(model), model]:
        fully_shard(unit, mesh=mesh)
    model.keep_weights()
    inputs = torch.ones(2, 4, device=device)
    if device == "cpu":
        with pytest.warns(UserWarning, match=r"teacher\.0\.weight.*gathered again"):
            for _ in range(3):
                model(inputs).mean().backward()
        return
    with pytest.raises(RuntimeError, match=r"teacher\.0\.weight.*computed with old values"):
        for _ in range(4):
            model(inputs).mean().backward()
            torch.cuda.synchronize()


@pytest.mark.parametrize("how", host_parts.HOW)
@on_devices(1, 2)
def test_parts_on_the_host(rank, world, device, how):
    """Autograd runs what the host computes on a thread of its own, at any time; gradients are those of one process."""
    torch.manual_seed(3)
    alone = host_parts.made(how).to(device)
    model = copy.deepcopy(alone)
    mesh = init_device_mesh(device, (world,))
    for unit in host_parts.units(model):
        fully_shard(unit, mesh=mesh)
    for step in range(STEPS):
        whole = torch.randn(ROWS, host_parts.WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        model(whole.chunk(world)[rank]).square().mean().backward()
        alone(whole).square().mean().backward()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(got.grad.full_tensor(), expected.grad)


@policies
@on_devices(1, 2)
def test_whole_steps_in_a_graph(rank, world, device, policy):
    """Forward, backward and optimizer step, captured once and replayed, do what they do without a graph."""
    mesh = init_device_mesh(device, (world,))
    captured, usual = (shard(build(device), mesh, mp_policy=policy) for _ in range(2))
    captured.set_keep_unsharded_storage(True)
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=LR) for model in (captured, usual)}
    batch = rows(usual, 0, rank, world, device)

    def step(model: Any) -> None:
        model(batch).backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    again = graphed(lambda: step(captured)) if device == "cuda" else lambda: step(captured)
    for _ in range(STEPS if device == "cuda" else STEPS + WARM_UP):
        again()
    for _ in range(STEPS + WARM_UP):
        step(usual)
    found, expected = ([p.to_local() for p in model.parameters()] for model in (captured, usual))
    assert_close(found, expected, rtol=0, atol=0)


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Run ``step`` a few times, capture it, and return what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
