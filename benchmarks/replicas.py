"""One step of eight copies of 64 simulated ranks: full sharding, hybrid sharding, and `shard_over_replicas`.

    python benchmarks/replicas.py                  # layers of a 70B model, eight micro-batches; minutes on one core
    python benchmarks/replicas.py --batches 1 --layers 2

The training code runs as it is, on one rank of 512, with tensors that have no memory and streams on which time passes
as a cost model says (`fsdp2/tools/forecast/cost.py`). Bytes and collectives are those of the real program; times are
estimates. `state` are parameters and optimizer state of this rank. `sent` are bytes of whole tensors in a step, over
all 512 ranks, over the 64 of a copy, and over the 8 copies. A copy is one machine of 64 (`--nodes-of 64`) or lies on
eight machines of 8; the bandwidth is that of one rank to other machines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from _common import arguments, markdown, publish
from _llama import SHAPES, Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.tools.forecast.cost import H100
from fsdp2.tools.forecast.run import forecast

COPIES, RANKS, LENGTH = 8, 64, 4096
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "full sharding": ({"shard": COPIES * RANKS}, {}),
    "hybrid sharding": ({"replicate": COPIES, "shard": RANKS}, {}),
    "shard_over_replicas": ({"replicate": COPIES, "shard": RANKS}, {"shard_over_replicas": True}),
}
HEAD = ["network", "", "state GiB", "peak GiB", "sent: all", "in a copy", "between copies", "exposed ms", "step ms"]


@dataclass
class Line:
    """The result of one way on one network."""

    network: str
    way: str
    state: float
    peak: float
    everywhere: float
    inside: float
    between: float
    exposed: float
    step: float

    def cells(self) -> list[str]:
        """The line of the table."""
        sizes = (self.state, self.peak, self.everywhere, self.inside, self.between)
        return [self.network, self.way, *(f"{size:.2f}" for size in sizes), f"{self.exposed:.1f}", f"{self.step:.1f}"]


def build(mesh: DeviceMesh, layers: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded layers and their optimizer."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*(Block(SHAPES["70b"]) for _ in range(layers)))
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: Any, optimizer: torch.optim.Optimizer, batches: int) -> None:
    """A step of some micro-batches, the last of which sums gradients over copies."""
    for number in range(batches):
        model.set_requires_all_reduce(number == batches - 1)
        model(torch.randn(1, LENGTH, SHAPES["70b"].width)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(nodes_of: int, gigabits: int, way: str, layers: int, batches: int) -> Line:
    """The second step of one way."""
    sizes, options = WAYS[way]
    machine = replace(H100, network_bytes_per_second=gigabits / 8 * 1e9, ranks_per_node=nodes_of)
    made = partial(build, layers=layers, **options)
    found = forecast(made, partial(step, batches=batches), mesh=sizes, hardware=machine, steps=2)
    sent = dict.fromkeys(("replicate", "shard"), 0.0)
    for one in found.collectives:
        sent[one.axis] += one.nbytes / 2**30
    everywhere = sent["shard"] if "replicate" not in sizes else 0.0
    kinds = found.bytes_by_kind
    return Line(
        f"{gigabits} Gbit/s, {nodes_of} ranks a machine",
        way,
        (kinds["shards"] + kinds["optimizer state"]) / 2**30,
        found.peak_bytes / 2**30,
        everywhere,
        sent["shard"] - everywhere,
        sent["replicate"],
        found.exposed_seconds * 1e3,
        found.step_seconds * 1e3,
    )


def lines(layers: int, batches: int, machines: list[int]) -> Iterator[Line]:
    """Every way on every network."""
    for nodes_of in machines:
        for gigabits in (25, 400):
            for way in WAYS:
                yield measured(nodes_of, gigabits, way, layers, batches)


def main() -> int:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=3, help="of the model (3)")
    parser.add_argument("--batches", type=int, default=8, help="micro-batches of a step (8)")
    parser.add_argument("--nodes-of", type=int, nargs="+", default=[64, 8], help="ranks of a machine (64 and 8)")
    options = parser.parse_args()
    found = list(lines(options.layers, options.batches, options.nodes_of))
    publish(
        "replicas", markdown(HEAD, [one.cells() for one in found]), list(map(asdict, found)), __doc__ or "", options
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
