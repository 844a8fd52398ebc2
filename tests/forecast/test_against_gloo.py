"""What a forecast says of memory and communication is what real processes need and send."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.forecasting.cost import tensors_in
from fsdp2.forecasting.run import forecast
from tests.support import ROOT, api
from tests.support.memory import LiveBytes
from tests.support.pool import LIMIT_SECONDS, POOL

sys.path.append(str(ROOT / "examples"))
gpt: Any = importlib.import_module("gpt.model")

pytestmark = api.fsdp2_only
STEPS, WIDTH = 3, 256
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Experts(nn.Module):
    """Every token goes through each of some feed-forwards, whose weights lie in three tensors."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.einsum("nh,ehw->enw", x, self.up).relu()
        return x + torch.einsum("enh,ehw,ne->nw", out, self.down, weights)


class Mixture(nn.Module):
    """Layers of experts; backward runs every second one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i % 2 else layer(x)
        return self.head(x)


def build(mesh: Any, name: str) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer."""
    torch.manual_seed(0)
    if name == "gpt":
        model: Any = gpt.GPT(gpt.GPTConfig(layers=3, width=WIDTH, heads=4, context=32))
        units = [*model.blocks, model]
    else:
        model = Mixture()
        units = [*model.layers, model]
    policy = MIXED if name == "mixture, mixed" else fsdp2.MixedPrecisionPolicy()
    for unit in units:
        fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: Any) -> None:
    """Train once."""
    if isinstance(model, gpt.GPT):
        tokens = torch.randint(256, (2, 33))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    else:
        loss = model(torch.randn(16, WIDTH)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Sent(TorchDispatchMode):
    """Counts launches and bytes of collectives by their operator."""

    NAMES = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "alltoall_base_": "all_to_all",
    }

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.nbytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = self.NAMES[func.overloadpacket.__name__]
            self.launches[kind] += 1
            self.nbytes[kind] += args[1 if kind == "reduce_scatter" else 0].nbytes
        return func(*args, **(kwargs or {}))


def on_rank(rank: int, world: int, name: str, peak: int, sent: dict[str, tuple[int, int]]) -> None:
    """Assert that the third step needs and sends what was forecast for the first rank."""
    model, optimizer = build(init_device_mesh("cpu", (world,)), name)
    for _ in range(STEPS - 1):
        step(model, optimizer)
    known = [*model.parameters(), *model.buffers(), *tensors_in([*optimizer.state.values()])]
    with LiveBytes(known) as live, Sent() as seen:
        step(model, optimizer)
    assert {kind: (seen.launches[kind], seen.nbytes[kind]) for kind in seen.launches} == sent
    if rank == 0:
        assert live.peak == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "mixture", "mixture, mixed"])
def test_real_processes(world, name):
    """Launches and bytes exactly, the peak of memory within three percent."""
    expected = forecast(lambda mesh: build(mesh, name), step, mesh={"shard": world}, backend="gloo", steps=STEPS)
    sent = {one.kind: (one.launches, one.nbytes) for one in expected.collectives}
    assert sum(expected.bytes_by_kind.values()) == expected.peak_bytes
    POOL.run(world, on_rank, {"name": name, "peak": expected.peak_bytes, "sent": sent}, LIMIT_SECONDS)
