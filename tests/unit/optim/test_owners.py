"""Owners are balanced, and what travels is bounded: arithmetic, on a pretended world."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2.optim.whole import full_params
from fsdp2.optim.whole.exchange import Layout
from fsdp2.optim.whole.owners import assign_owners, boxes_of, default_cost
from fsdp2.optim.whole.ownership import Ownership
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.boxes import numel
from tests.support.counting import Collectives
from tests.support.fake import fake_mesh

ROWS = (Shard(0),)
SHAPES = [(48, 48), (48, 192), (192, 48)] * 8


def sharded(mesh: Any, shapes: Any = SHAPES, placements: Any = ROWS) -> list[Any]:
    """Return DTensor parameters with gradients."""
    found = []
    for shape in shapes:
        param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None))
        param.grad = torch.zeros_like(param)
        found.append(param)
    return found


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_cost_is_even_or_the_largest_matrix(world):
    """No owner has more than a tenth above the mean, or than one matrix where that is more."""
    with fake_mesh(world) as mesh:
        params = sharded(mesh)
        owners = [owner for (owner,) in assign_owners(params, default_cost)]
        costs = [default_cost(p) for p in params]
        load = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(world)]
        assert max(load) <= max(1.1 * sum(load) / world, max(costs))
        by_count = [owner for (owner,) in assign_owners(params, lambda p: 1.0)]
        counts = [by_count.count(rank) for rank in range(world)]
        assert max(counts) - min(counts) <= 1


def test_matrices_of_a_stack_share_its_cost():
    """A matrix that costs more than one of a stack is given away before them."""
    with fake_mesh(2) as mesh:
        stack, matrix = sharded(mesh, [(3, 4, 4), (4, 4)])
        owners = assign_owners([stack, matrix], lambda param: 3.0 if param is stack else 1.2, [3, 1])
        assert [sorted(own) for own in owners] == [[0, 1, 1], [0]]


@pytest.mark.parametrize(
    "placements", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(0))]
)
def test_boxes_make_the_whole(placements):
    """Each element is in the box of every rank that has a copy, for cuts that leave ranks short."""
    with fake_mesh(6, rank=4):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        (param,) = sharded(mesh, [(5, 4)], placements)
        seen = torch.zeros(5, 4)
        for box in boxes_of(param, "here"):
            seen[tuple(slice(start, start + length) for start, length in box)] += 1
        assert torch.equal(seen, torch.full((5, 4), 6.0 / pieces(placements)))


def pieces(placements: Any) -> int:
    """Return over how many ranks a tensor is cut."""
    total = 1
    for placement, size in zip(placements, (2, 3), strict=True):
        total *= size if isinstance(placement, Shard) else 1
    return total


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_collectives_and_buckets(world):
    """A step sends at most three shards' worth, in two collectives a bucket and two more, within the bucket's size."""
    with fake_mesh(world) as mesh:
        params = sharded(mesh)
        optimizer = fsdp2.use_full_params(torch.optim.Muon(params), bucket_mb=0.25)
        with Collectives() as collectives:
            optimizer.step()
        assert 0 < sum(collectives.counts.values()) <= 2 * len(buckets(params, 1 << 18)) + 2
        shard_bytes = sum(p.to_local().nbytes for p in params)
        padding = 16 * 3 * len(params) * world
        layouts = [layout for one in buckets(params, 1 << 18) for layout in (one.inward, one.outward)]
        assert sum(layout.nbytes_sent for layout in layouts) <= 3 * shard_bytes + padding
        for bucket in buckets(params, 1 << 18):
            whole = sum(2 * owned.param.numel() * 4 for owned in bucket.owned if owned.mine)
            assert whole <= 1 << 18


def stacks(params: list[Any]) -> Stacks:
    """Return the stacks among ``params``: those of three dimensions."""
    return Stacks(torch.optim.SGD(params), lambda param: param.ndim == 3)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_matrices_of_a_stack_are_spread_evenly(world, placement):
    """A stack has an owner for each matrix, as many for each rank, and a rank owns what it holds: one rank owned all.

    Nothing is sent then if the experts are as many as ranks, or a multiple.
    """
    with fake_mesh(world) as mesh:
        for count in (2 * world, 2 * world + 1):
            params = sharded(mesh, [(count, 6, 8), (count, 8, 6)], (placement,))
            (ranks,) = Ownership(params, default_cost, stacks(params)).sets
            assert [owned.index for owned in ranks.owned] == [*range(count)] * 2
            owners = [owned.route.owner for owned in ranks.owned]
            held = [owners.count(rank) for rank in range(world)]
            assert max(held) - min(held) <= 1
            everything = set(params), set(params), (None, None)
            bucket = full_params._plan_bucket(ranks, [(owned, torch.float32) for owned in ranks.owned], *everything)
            sent = bucket.inward.nbytes_sent + bucket.outward.nbytes_sent
            assert (sent == 0) == (placement.dim == 0 and count == 2 * world) or count % world
            assert sent <= 3 * sum(param.to_local().nbytes for param in params) + 16 * 3 * len(ranks.owned) * world


def buckets(params: list[Any], limit: int) -> list[Any]:
    """Return the buckets of a step."""
    (ranks,) = Ownership(params, default_cost, stacks(params)).sets
    used = [(owned, torch.float32) for owned in ranks.owned]
    return [
        full_params._plan_bucket(ranks, bucket, set(params), set(params), (None, None))
        for bucket in ranks.buckets(used, limit)
    ]


def test_small_matrices_are_computed_beside_large_ones():
    """While one rank has a large matrix, others have several small ones, of no more bytes. With one in each bucket
    small ones were left when the large ones were done, and ranks waited for each other bucket after bucket."""
    with fake_mesh(2) as mesh:
        params = sharded(mesh, [(64, 64), (16, 16), (64, 64), *[(32, 32)] * 4, (16, 16), (64, 64)])
        (ranks,) = Ownership(params, default_cost, stacks(params)).sets
        used = [(owned, torch.float32) for owned in ranks.owned]
        for limit in (1, 1 << 14, 1 << 20):
            found = [*ranks.buckets(used, limit)]
            assert sorted(ranks.owned.index(one) for bucket in found for one, _ in bucket) == [*range(9)]
            for bucket in found:
                sizes = [[one.numel for one, _ in bucket if one.route.owner == owner] for owner in range(2)]
                largest = max(numel for some in sizes for numel in some)
                assert all(sum(some) <= max(limit / 8, largest) for some in sizes)
            assert len(found) == {1: 4, 1 << 14: 3, 1 << 20: 1}[limit]


def test_hybrid_sharding_sends_no_more():
    """Each copy gets its piece back, and of the copies only one sends: three shards' worth at most as well."""
    with fake_mesh(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        params = sharded(mesh, placements=(Replicate(), Shard(0)))
        shard_bytes = sum(p.to_local().nbytes for p in params)
        sent = sum(one.inward.nbytes_sent + one.outward.nbytes_sent for one in buckets(params, 1 << 30))
        assert sent <= 3 * shard_bytes + 16 * 3 * len(params) * 8


@pytest.mark.parametrize("count", [4, 8, 12])
def test_experts_travel_within_their_own_group(count):
    """Experts are dealt out to groups of two ranks, and each is cut over the two. An owner among these two has as much
    to do as any other, and its exchange is one of two ranks; all eight took part in it."""
    found = []
    for rank in range(8):
        with fake_mesh(2, 4, names=("shard", "experts"), rank=rank) as mesh:
            stack, other = sharded(mesh, [(count, 6, 8)] * 2, (Shard(1), Shard(0)))
            (matrix,) = sharded(mesh._flatten("all"), [(16, 1)])
            dense, experts = Ownership([matrix, stack, other], default_cost, stacks([stack, matrix])).sets
            assert dense.part.axis.size == 8 and experts.part.axis.size == 2
            assert sorted(experts.part.places) == [rank % 4, rank % 4 + 4]
            owners = [owned.route.owner for owned in experts.owned]
            assert all(owner in owned.route.holders for owner, owned in zip(owners, experts.owned, strict=True))
            assert {owners.count(one) for one in range(8)} == {count // 4}
            mine = [owned.index for bucket in experts.buckets(*used_of(experts)) for owned, _ in bucket]
            assert sorted(set(mine)) == [*range(rank % 4 * count // 4, (rank % 4 + 1) * count // 4)]
            found.append(owners)
    assert all(owners == found[0] for owners in found)


def used_of(ranks: Any) -> tuple[list[Any], int]:
    """Return what a step uses, all of it, and a size of buckets."""
    return [(owned, torch.float32) for owned in ranks.owned], 1 << 20


@pytest.mark.parametrize("count", [3, 5, 6, 16])
def test_experts_that_are_not_as_many_everywhere(count):
    """If some ranks hold more of them, or none, all ranks share the work."""
    with fake_mesh(8) as mesh:
        (ranks,) = Ownership(params := sharded(mesh, [(count, 6, 8)]), default_cost, stacks(params)).sets
        owners = [owned.route.owner for owned in ranks.owned]
        assert ranks.part.axis.size == (1 if count == 16 else 8)
        assert max(owners.count(one) for one in range(8)) == -(-count // 8)


def test_an_owner_in_each_replica():
    """With ``over_replicas=False`` nothing travels between replicas, and the ranks of each own all matrices."""
    for rank in range(8):
        with fake_mesh(2, 4, names=("replicate", "shard"), rank=rank) as mesh:
            params = sharded(mesh, placements=(Replicate(), Shard(0)))
            replica = [*range(rank // 4 * 4, rank // 4 * 4 + 4)]
            (ranks,) = Ownership(params, default_cost, stacks(params), over_replicas=False).sets
            assert ranks.axis.size == 8 and ranks.part.axis.size == 4 and [*ranks.part.places] == replica
            assert {owned.route.owner for owned in ranks.owned} == {*replica}
            assert all({*owned.route.holders, *owned.route.senders} == {*replica} for owned in ranks.owned)


def test_ranks_agree_on_owners_where_meshes_cross():
    """A rank does not know what parameters of a mesh that it is not in give to others. It balanced by that, and ranks
    took other ones for the owners: they waited for each other, or read what was meant for something else."""
    shapes, found = [(9, 8), (8, 9), (30, 30), (4, 4)], {}
    for rank in range(4):
        with fake_mesh(2, 2, names=("a", "b"), rank=rank) as mesh:
            params = [*sharded(mesh["a"], shapes), *sharded(mesh["b"], shapes[::-1])]
            found[rank] = assign_owners(params, default_cost)
    for one, other in itertools.combinations(range(4), 2):
        along_a, along_b = one % 2 == other % 2, one // 2 == other // 2
        assert not along_a or found[one][:4] == found[other][:4]
        assert not along_b or found[one][4:] == found[other][4:]


def test_layouts_of_two_ranks_match():
    """What one sends to the other is what that one expects, in size and order."""
    found = {}
    for rank in range(3):
        with fake_mesh(3, rank=rank) as mesh:
            params = sharded(mesh, [(5, 3), (2, 2), (7, 1)])
            (ranks,) = Ownership(params, default_cost, stacks(params)).sets
            routes = [owned.route for owned in ranks.owned]
            for inward in (True, False):
                dtypes = [torch.float32, torch.bfloat16, torch.float32]
                found[rank, inward] = Layout(routes, dtypes, ranks.part, ranks.device, to_owner=inward)
    for a, b in itertools.permutations(range(3), 2):
        for inward in (True, False):
            assert found[a, inward].send_sizes[b] == found[b, inward].receive_sizes[a]
            sent = message(found[a, inward].sent, found[a, inward].send_sizes, b)
            assert sent == message(found[b, inward].received, found[b, inward].receive_sizes, a)


def message(slots: Any, sizes: list[int], peer: int) -> list[tuple[Any, ...]]:
    """Return what travels to or from a rank: entry, box and place in the message."""
    start, end = sum(sizes[:peer]), sum(sizes[: peer + 1])
    return [(s.index, s.box, s.offset - start) for s in slots if start <= s.offset < end and numel(s.box)]
