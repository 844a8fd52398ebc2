"""Torch's sharding strategies train like a single process, by policy and by hand, alone and mixed in one model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import _trace
from tests.grouping.models import FROZEN, Block, Net, nodes_mesh
from tests.support import api
from tests.support.counting import Collectives
from tests.support.parity import (
    STEPS,
    accumulate,
    assert_gradients,
    assert_parity,
    mesh_1d,
    mesh_2d,
    play,
    stack,
    train,
)
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

STRATEGIES = [strategy.name for strategy in ShardingStrategy]
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
strategies = pytest.mark.parametrize("name", STRATEGIES)


def options(name: str) -> dict[str, object]:
    """Return the strategy and a mesh for it."""
    return {"strategy": ShardingStrategy[name], "mesh": nodes_mesh() if name in HYBRID else mesh_1d()}


def by_policy(name: str):
    """Return what shards a ``Net`` by the class of its blocks."""
    return lambda module, fsdp: fsdp.fully_shard(module, policy=ModuleWrapPolicy({Block}), **options(name))


def by_hand(name: str):
    """Return what shards each block of a ``Net``, then the whole."""
    return lambda module, fsdp: [fsdp.fully_shard(unit, **options(name)) for unit in (*module.blocks, module)]


@on_ranks(1, 2, 4)
@strategies
@pytest.mark.parametrize("way", ["policy", "hand"])
@pytest.mark.parametrize("recompute", [None, True])
def test_training(rank, world, name, way, recompute):
    """Losses, gradients and weights are those of a single process; ties across units hold."""
    prepare = (by_policy if way == "policy" else by_hand)(name)
    run = assert_parity(prepare, build=lambda: Net(recompute=recompute, tied=True), against=("alone",))
    weight = run.module.blocks[0].up.weight
    kept = {"NO_SHARD": (Replicate(),), "FULL_SHARD": (Shard(0),), "SHARD_GRAD_OP": (Shard(0),)}
    assert weight.placements == kept.get(name, (Replicate(), Shard(0)))


@on_ranks(2, 4)
@strategies
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize(("repeat", "recompute"), [(1, None), (2, False)])
def test_frozen_and_trainable_parameters_mixed(rank, world, name, frozen, repeat, recompute):
    """Within and across units, used once or twice, with and without checkpointing; frozen ones get no gradient."""
    build = lambda: Net(repeat=repeat, recompute=recompute, frozen=frozen)
    run = assert_parity(by_policy(name), build=build, against=("alone",))
    run.backward(5)
    for parameter in run.module.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


@on_ranks(2, 4)
@strategies
def test_order_is_the_same_by_policy_and_by_hand(rank, world, name):
    """Every gather, reshard and reduction of some steps, in order and by name."""
    seen = []
    for way in (by_policy, by_hand):
        events: list[tuple[str, str]] = []
        with _trace.listening(lambda event, unit, events=events: events.append((event, unit))):
            play(fsdp2, way(name), build=Net)
        seen.append(events)
    assert seen[0] == seen[1]
    after_forward = {"FULL_SHARD": True, "HYBRID_SHARD": True, "NO_SHARD": None}.get(name, False)
    unshards = [unit for event, unit in seen[0] if event == "unshard"]
    # The root, too, is freed by the strategies that free; by default backward finds it there.
    expected = STEPS * {True: 8, None: 7, False: 4}[after_forward]
    # From the second step on, the unit that forward ends with stays gathered for backward.
    assert len(unshards) == expected - (0 if after_forward is False else STEPS - 1)


@on_ranks(2, 4)
@pytest.mark.parametrize("mixed", [False, True])
def test_mixed_in_one_model(rank, world, mixed):
    """Each unit follows its own strategy; each gradient is the mean over all ranks."""
    names = ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
    low, whole = (torch.bfloat16, torch.float32) if mixed else (None, None)

    def prepare(module, fsdp):
        units = [module.stem, *module.blocks, module]
        for unit, name in zip(units, ["_HYBRID_SHARD_ZERO2", *names, "FULL_SHARD"], strict=True):
            policy = MixedPrecisionPolicy(low, whole, whole if unit is module else None)
            fsdp.fully_shard(unit, mp_policy=policy, **options(name))

    assert_parity(prepare, build=Net, against=("alone",), tolerance=0.05 if mixed else 2e-5)


@on_ranks(2, 4)
def test_ties_across_strategies(rank, world):
    """A weight that a sharded and a replicated unit share is one parameter with one gradient."""

    def prepare(module, fsdp):
        fsdp.fully_shard(module.stem, strategy=ShardingStrategy.NO_SHARD)
        fsdp.fully_shard(module.blocks[0], strategy=ShardingStrategy.HYBRID_SHARD, mesh=nodes_mesh())
        fsdp.fully_shard(module.head, strategy=ShardingStrategy.HYBRID_SHARD, mesh=nodes_mesh())
        fsdp.fully_shard(module, strategy=ShardingStrategy.SHARD_GRAD_OP)

    run = assert_parity(prepare, build=lambda: Net(tied=True), against=("alone",))
    assert run.module.stem.weight is run.module.head.weight


@on_ranks(2, 4)
@pytest.mark.parametrize("two", [False, True])
def test_no_shard_only_all_reduces(rank, world, two):
    """Nothing is gathered; each unit's gradients are all-reduced once, over both dimensions of a 2D mesh."""
    module = Net()
    fsdp2.fully_shard(module, policy={Block}, strategy=ShardingStrategy.NO_SHARD, mesh=nodes_mesh() if two else None)
    with Collectives() as seen:
        module(torch.ones(2, 8)).sum().backward()
    assert (seen.gathers, seen.reductions) == (0, 4)
    for parameter in module.parameters():
        assert parameter.to_local().shape == parameter.grad.to_local().shape == parameter.shape
        assert parameter.device_mesh.ndim == 1 + two


@on_ranks(4)
def test_hybrid_without_a_mesh_cuts_within_a_node(rank, world):
    """The launcher says how many ranks a node has; one mesh serves all units, also those made one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        prepare = lambda module, fsdp: [
            fsdp.fully_shard(unit, strategy=ShardingStrategy.HYBRID_SHARD) for unit in (*module.blocks, module)
        ]
        run = assert_parity(prepare, build=Net, against=("alone",))
        mesh = run.module.stem.weight.device_mesh
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh is run.module.blocks[0].up.weight.device_mesh
        for size in ("3", "0", "many"):
            patch.setenv("LOCAL_WORLD_SIZE", size)
            with pytest.raises(ValueError, match="nodes of one size|a number of ranks of at least 1"):
                fsdp2.fully_shard(nn.Linear(4, 4), strategy=ShardingStrategy.HYBRID_SHARD)
        patch.setenv("LOCAL_WORLD_SIZE", "8")
        one = fsdp2.fully_shard(nn.Linear(4, 4), strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)
        assert tuple(one.weight.device_mesh.shape) == (1, 4)
        patch.delenv("LOCAL_WORLD_SIZE")
        if not torch.accelerator.is_available():
            with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is not set.*init_device_mesh"):
                fsdp2.fully_shard(nn.Linear(4, 4), strategy=ShardingStrategy.HYBRID_SHARD)


@on_ranks(4)
def test_accumulation_over_both_axes(rank, world):
    """Without gradient sync a replicated unit accumulates whole gradients, then reduces their sum."""
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        program = partial(accumulate, batches=3, setter=setter)
        for name in ("NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
            assert_parity(by_policy(name), build=Net, program=program, against=("alone",))


@on_ranks(2, 4)
@strategies
def test_meta_device(rank, world, name):
    """A model built without memory is sharded, gets some, and trains; all of a weight's pieces are there."""
    with torch.device("meta"):
        module = Net(tied=True)
    fsdp2.fully_shard(module, policy="auto", replicated_params={module.norm.weight}, **options(name))
    module.to_empty(device="cpu")
    alone = Net(tied=True)
    with torch.no_grad():
        for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
            nn.init.constant_(mine, 0.1) if mine.ndim > 1 else nn.init.ones_(mine)
            nn.init.constant_(other, 0.1) if other.ndim > 1 else nn.init.ones_(other)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module(x), alone(x))
    module(x).sum().backward()
    alone(x).sum().backward()
    assert_gradients(module, alone)


@on_ranks(4)
def test_contradictions_are_refused(rank, world):
    """What strategy, mesh and reshard_after_forward say must agree; the text says what to do."""
    cases = [
        ("FULL_SHARD", {"reshard_after_forward": False}, "contradicts strategy FULL_SHARD.*SHARD_GRAD_OP"),
        ("FULL_SHARD", {"reshard_after_forward": 1}, "contradicts strategy FULL_SHARD"),
        ("HYBRID_SHARD", {"reshard_after_forward": False, "mesh": mesh_2d()}, "_HYBRID_SHARD_ZERO2"),
        ("SHARD_GRAD_OP", {"reshard_after_forward": True}, "contradicts strategy SHARD_GRAD_OP.*FULL_SHARD"),
        ("_HYBRID_SHARD_ZERO2", {"reshard_after_forward": 2, "mesh": mesh_2d()}, "contradicts.*HYBRID_SHARD"),
        ("NO_SHARD", {"reshard_after_forward": 2}, "contradicts strategy NO_SHARD.*pass a bool"),
        ("FULL_SHARD", {"mesh": mesh_2d()}, "needs a mesh with one shard dimension.*HYBRID_SHARD"),
        ("SHARD_GRAD_OP", {"mesh": mesh_2d()}, "needs a mesh with one shard dimension"),
        ("HYBRID_SHARD", {"mesh": mesh_1d()}, "needs a mesh with a replicate and a shard dimension.*init_device_mesh"),
        ("_HYBRID_SHARD_ZERO2", {"mesh": mesh_1d()}, "needs a mesh with a replicate and a shard dimension"),
    ]
    for name, given, match in cases:
        module = stack()
        with pytest.raises(ValueError, match=match):
            fsdp2.fully_shard(module, strategy=ShardingStrategy[name], **given)
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    with pytest.raises(TypeError, match="strategy must be a torch.distributed.fsdp.ShardingStrategy, got 'FULL_SHARD'"):
        fsdp2.fully_shard(stack(), strategy="FULL_SHARD")
    with pytest.raises(TypeError, match="got process groups; make one of them with DeviceMesh.from_group"):
        groups = (dist.group.WORLD, dist.group.WORLD)
        fsdp2.fully_shard(stack(), strategy=ShardingStrategy.HYBRID_SHARD, mesh=groups)


@on_ranks(4)
def test_an_int_may_refine_what_is_freed(rank, world):
    """FULL_SHARD frees parameters after forward, to a few ranks if asked."""
    prepare = lambda module, fsdp: fsdp.fully_shard(
        module, policy={Block}, strategy=ShardingStrategy.FULL_SHARD, mesh=mesh_1d(), reshard_after_forward=2
    )
    run = assert_parity(prepare, build=Net, against=("alone",), program=train)
    run.loss(9)
    assert tuple(run.module.blocks[0].up.weight.device_mesh.shape) == (2, 2)
