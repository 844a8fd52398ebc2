"""Units that only some ranks use, in every pattern over the steps: gradients are the mean over all ranks.

``set_reduce_scatter_unused_params(True)`` marks them. A rank that skips such a unit gathers it when it is its turn,
frees it, and sends zeros. Until some rank has used it nobody knows when that is: any rank may use it at any time.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tools.check.strict import LiveBytes
from tests.support.parity import fulls
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks

Uses = set[int]
"""The ranks that use the tower."""


class Tower(nn.Module):
    """Blocks behind an entry of their own; ``adapter`` is added to the output of the second."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.adapter = nn.Linear(8, 8) if adapter else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](x + self.entry))
        out = self.blocks[1](x)
        return out if self.adapter is None else out + self.adapter(x)


class Multimodal(nn.Module):
    """Text that may come with an image, a sound, or both."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        if not kind.tower_last:
            self.vision = Tower(kind.adapter)
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if kind.tower_last:
            self.vision = Tower(kind.adapter)
        self.sound = Tower() if kind.two else None
        self.recompute = kind.recompute

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None, sound: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(tokens)
        for tower, data in ((self.vision, image), (self.sound, sound)):
            if data is not None and tower is not None:
                x = x + (checkpoint(tower, data, use_reentrant=False) if self.recompute else tower(data))
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


@dataclass(frozen=True)
class Kind:
    """One way to build and train the model."""

    tower_last: bool = False
    frozen: bool = False
    adapter: bool = False
    two: bool = False
    recompute: bool = False
    mark: str = "root"
    reshard: bool | None = None
    dtype: torch.dtype | None = None
    batches: int = 1
    replicas: int = 1
    streamed: bool = False


KINDS = {
    "plain": Kind(),
    "tower registered last": Kind(tower_last=True),
    "tower alone marked": Kind(mark="tower"),
    "kept after forward": Kind(reshard=False),
    "frozen": Kind(frozen=True),
    "frozen with an adapter": Kind(frozen=True, adapter=True, mark="tower"),
    "two towers": Kind(two=True),
    "recomputed": Kind(recompute=True, mark="tower"),
    "mixed precision": Kind(dtype=torch.bfloat16),
    "three batches": Kind(batches=3),
    "three batches, kept": Kind(batches=3, reshard=False, mark="tower"),
    "replicas": Kind(replicas=2),
    "streamed": Kind(streamed=True, reshard=True),
}
PLANS: dict[str, list[Uses]] = {
    "late, by one": [set(), {1}, set(), {0}],
    "from the start, by one": [{0}, {1}, {0, 1}, set()],
    "all, then none, then one": [{0, 1, 2, 3}, set(), {1}],
    "never": [set(), set()],
    "in the second batch": [set(), {0, 1, 2, 3}, {1}],
}


def build(kind: Kind) -> Multimodal:
    """The model on one process."""
    torch.manual_seed(0)
    model = Multimodal(kind)
    if kind.frozen:
        for name, param in model.vision.named_parameters():
            param.requires_grad_("adapter" in name)
    return model


def shard(model: Multimodal, kind: Kind, world: int) -> None:
    """Every part is a unit; towers have units inside."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (kind.replicas, world // kind.replicas), mesh_dim_names=names)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=kind.dtype, reduce_dtype=torch.float32 if kind.dtype else None)
    options = {
        "mesh": mesh if kind.replicas > 1 else mesh["shard"],
        "mp_policy": policy,
        "reshard_after_forward": kind.reshard,
    }
    towers = [model.vision] + ([] if model.sound is None else [model.sound])
    for tower in towers:
        for block in (*tower.blocks, tower):
            fsdp2.fully_shard(block, **options)
    for layer in (model.embed, *model.layers, model):
        fsdp2.fully_shard(layer, **options)
    if kind.streamed:  # each gradient leaves when it is there
        model.set_transfer_sizes(direct_param_bytes=128, direct_group_bytes=0, chunk_bytes=64)
    for marked in towers if kind.mark == "tower" else [model]:
        marked.set_reduce_scatter_unused_params(True)


def batch(step: int, micro: int, rank: int, uses: Uses) -> tuple[torch.Tensor, ...]:
    """What one rank computes with: the tower's users have an image, and those of the step after have a sound."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(5, (4,), generator=generator)
    image, sound = torch.randn(2, 4, 8, generator=generator)
    return tokens, image if rank in uses else None, sound if rank + 1 in uses else None


def train_and_compare(rank: int, world: int, kind: Kind, plan: list[Uses]) -> None:
    """One rank of a case: train both, comparing gradients at each step."""
    tolerance = {} if kind.dtype is None else {"rtol": 5e-2, "atol": 5e-2}
    whole = build(kind)
    model = copy.deepcopy(whole)
    shard(model, kind, world)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
    for step, uses in enumerate(plan):
        for micro in range(kind.batches):
            # In other batches than the last nobody uses the towers but in the second of three.
            used = uses if micro in (1, kind.batches - 1) else set()
            batches = [batch(step, micro, r, used) for r in range(world)]
            if kind.batches > 1:
                model.set_requires_gradient_sync(micro == kind.batches - 1)
            with torch.no_grad():  # an evaluation in between, where only some ranks have images
                seen, expected = model(*batches[rank]), whole(*batches[rank])
                torch.testing.assert_close(seen.float(), expected, rtol=2e-2, atol=2e-2)
            model(*batches[rank]).backward()
            (sum(whole(*one) for one in batches) / world).backward()
        gradients = fulls({name: param.grad for name, param in model.named_parameters()})
        for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert param.requires_grad == expected.requires_grad
            gradient, mean = gradients[name], torch.zeros_like(expected) if expected.grad is None else expected.grad
            if gradient is None:
                assert not mean.any(), f"step {step}: {name} has no gradient"
            else:
                assert expected.requires_grad
                torch.testing.assert_close(gradient, mean, msg=f"step {step}: {name}", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def cases() -> list:
    """Every kind with every plan: those that are not slow are every kind with a late first use, and every plan once."""
    found = []
    for kind, plan in itertools.product(KINDS, PLANS):
        world = 4 if KINDS[kind].replicas > 1 else 2
        quick = kind == "plain" or plan == "late, by one"
        found.append(pytest.param(world, kind, plan, marks=[] if quick else [pytest.mark.slow], id=f"{kind}: {plan}"))
        if world == 2:
            found.append(pytest.param(4, kind, plan, marks=[pytest.mark.slow], id=f"{kind}: {plan}, on 4"))
    return found


@pytest.mark.parametrize(("world", "kind", "plan"), cases())
def test_units_that_only_some_ranks_use(world, kind, plan):
    """Of 162 patterns 18 raised on every rank: those in which no rank had used the tower in the steps before. torch
    hangs or aborts in most of them; people feed dummy images."""
    POOL.run(world, train_and_compare, {"kind": KINDS[kind], "plan": PLANS[plan]}, LIMIT_SECONDS)


class Mixture(nn.Module):
    """A dense gate, and experts of which each rank uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        for number in used:
            x = x + weights[:, number, None] * self.experts[number](x)
        return x


USED = [[[0, 1, 3], [0, 1, 2]], [[0, 1], [0, 1]], [[0, 1, 2], [1, 3]], [[2], [0, 3]]]
"""By step, the experts of the second block that each of two ranks uses. In the third step, rank 0 is still inside the
block and prefetches when rank 1 wants to reduce the block's gate, since it has skipped the first expert."""


@on_ranks(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_experts_inside_a_block_that_no_rank_skips(rank, world, checkpointed):
    """The experts are marked, their blocks are not. It raised "ranks do not do the same" in most runs: the ranks chose
    to reduce a block that one of them was not through with, because that rank only wanted to prefetch then.

    Where the block is checkpointed, a rank that uses two experts gathers both before the backward of either. Ranks that
    learned to reduce the first before they gather the second could not go on with it."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Mixture(), Mixture()])
    whole = copy.deepcopy(blocks)
    for block in blocks:
        for expert in block.experts:
            fsdp2.fully_shard(expert).set_reduce_scatter_unused_params(True)
        fsdp2.fully_shard(block)
    root = fsdp2.fully_shard(Chain(blocks, checkpointed))
    for step, used in enumerate(USED):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) + r for r in range(world)]
        root(inputs[rank], used[rank]).backward()
        (sum(Chain(whole)(x, by_rank) for x, by_rank in zip(inputs, used)) / world).backward()
        gradients = fulls({name: param.grad for name, param in blocks.named_parameters()})
        for name, expected in whole.named_parameters():
            mean = torch.zeros_like(expected) if expected.grad is None else expected.grad
            torch.testing.assert_close(gradients[name], mean, msg=f"step {step}: {name}")
        for module in (blocks, whole):
            module.zero_grad()


class Tall(nn.Module):
    """A tower of layers that a rank may skip, and a layer behind it that no rank skips."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        self.last = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor, climbs: bool) -> torch.Tensor:
        return self.last(self.tower(x) if climbs else x)


@on_ranks(2)
@pytest.mark.parametrize("trains", [True, False])
def test_units_that_a_rank_passes_by_are_not_in_memory_together(rank, world, trains):
    """Rank 1 gathers the tower's layers because rank 0 uses them. It held all of them to the end of the forward."""
    model = Tall()
    for layer in model.tower:
        fsdp2.fully_shard(layer).set_reduce_scatter_unused_params(True)
    fsdp2.fully_shard(model)
    layer_bytes = sum(parameter.nbytes for parameter in model.tower[0].parameters())
    x = torch.randn(2, 256)
    for step in range(3):  # the first shows where the tower's layers come; the others need no messages
        model.zero_grad()
        with LiveBytes(model.parameters()) as live, torch.set_grad_enabled(trains):
            before = live.now
            loss = model(x, climbs=rank == 0).sum()
        if step:  # the first one also makes shards and buffers
            assert live.peak - before < 2.5 * layer_bytes, f"{(live.peak - before) / layer_bytes} layers"
        if trains:
            loss.backward()


class Chain(nn.Module):
    """Two blocks, of which the first uses other experts than the second."""

    def __init__(self, blocks: nn.ModuleList, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = blocks
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for block, by_block in zip(self.blocks, (used[::-1], used)):
            x = checkpoint(block, x, by_block, use_reentrant=False) if self.checkpointed else block(x, by_block)
        return x.square().mean()


class Speaker(nn.Module):
    """A gate and experts, and a method that calls forward once for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = torch.tanh(self.gate(x))
        for index in used:
            x = x + self.experts[index](x)
        return x

    def generate(self, x: torch.Tensor, by_token: list[list[int]]) -> torch.Tensor:
        for used in by_token:
            x = self(x, used)
        return x


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("any_order", [False, True])
def test_tokens_of_other_experts(rank, world, any_order, reshard):
    """A registered method calls forward for each token, and each token uses other experts on each rank.

    The schedule of the token before was followed, although a rank may use any expert: a rank that came to another one
    asked the others, which did not know, and all raised "ranks do not do the same". Nor may a rank that joined the
    gather of an expert keep it to the next token, if the rank that used it does not."""
    torch.manual_seed(0)
    alone = Speaker()
    model = copy.deepcopy(alone)
    for unit in (model.gate, *model.experts):
        fsdp2.fully_shard(unit, reshard_after_forward=reshard)
    fsdp2.fully_shard(model)
    for expert in model.experts:
        expert.set_reduce_scatter_unused_params(True, any_order=any_order)
    fsdp2.register_fsdp_forward_method(model, "generate")
    by_rank = [[[0], [0], [], [0]], [[0], [0, 1], [2], [0, 2]]]
    x = torch.randn(4, 8)
    with torch.no_grad():
        for tokens in ([0, 1, 2, 3], [3, 2, 1, 0]):
            used = [by_rank[rank][token] for token in tokens]
            torch.testing.assert_close(model.generate(x, used), alone.generate(x, used))


@on_ranks(2)
def test_experts_used_one_after_another_by_hand(rank, world):
    """A gather by hand first joined those of the schedule that was known, of other experts: nobody freed these, and
    after four blocks all four experts were in memory."""
    model = Tall()
    for layer in model.tower:
        fsdp2.fully_shard(layer).set_reduce_scatter_unused_params(True)
    fsdp2.fully_shard(model)
    with torch.no_grad():
        model(torch.randn(2, 256), climbs=True)  # makes shards and buffers
        with LiveBytes(model.parameters()) as live:
            before = live.now
            for layer in model.tower[:4]:
                with fsdp2.use_weights(layer):
                    assert layer.weight.shape == (256, 256)
            assert live.now - before < 4 * 2**12, "samples of the shards stay, and no weights, of 2**18 bytes each"
