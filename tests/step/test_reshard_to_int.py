"""``reshard_after_forward=<int>``: after forward, parameters stay cut over a few neighbouring ranks."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.counting import Collectives
from tests.support.parity import SEED, Run, assert_parity, mesh_1d, mesh_2d, mesh_of, shard_each, sharded, stack
from tests.support.pool import on_ranks


def process_groups() -> int:
    """Return how many process groups this process has made and kept."""
    return len(dist.distributed_c10d._world.pg_map)


def train_and_look(size: int, run: Run) -> None:
    """Train; between forward and backward, look at what ours shows."""
    for step in range(3):
        loss = run.loss(step)
        if run.fsdp is api.ours:
            for name, parameter in run.module[0].named_parameters():
                assert isinstance(parameter, DTensor), name
                assert parameter.device_mesh.shape[1] == size, (name, parameter.device_mesh)
                run.notes.append((step, name, parameter.placements, parameter.full_tensor()))
        loss.backward()
        run.update()


@composes("reshard to int", "shard dim")
@on_ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_stay_on_two_ranks(rank, world, dim):
    """They are shown as DTensors on a (2, 2) mesh that give the whole parameter; training is torch's."""
    torch.manual_seed(SEED)
    original = dict(stack()[0].named_parameters())
    place = lambda p: Shard(min(dim, p.ndim - 1))
    run = assert_parity(
        partial(shard_each, mesh=mesh_1d(), reshard_after_forward=2, shard_placement_fn=place),
        program=partial(train_and_look, 2),
        against=("torch", "alone") if dim == 0 else ("alone",),  # torch's shows Shard(0) whatever was cut
    )
    for step, name, placements, whole in run.notes:
        assert placements == (Replicate(), place(original[name]))
        if step == 0:
            assert torch.equal(whole, original[name])


@on_ranks(4)
def test_backward_gathers_over_two_ranks(rank, world):
    """The gather of backward receives half of what forward's needs, and there is one for each unit."""
    module = sharded(reshard_after_forward=2)
    sent = []
    with Collectives() as seen:
        loss = module(torch.ones(2, 8)).sum()
        sent.append((seen.gathers, module[0].weight.device_mesh.shape))
        seen.reset()
        loss.backward()
        sent.append((seen.gathers, module[0].weight.device_mesh.shape))
    assert sent == [(3, (2, 2)), (3, (4,))]


@api.fsdp2_only
@on_ranks(4)
def test_an_evaluation_leaves_the_pieces(rank, world):
    """An evaluation between forward and backward freed the pieces that backward needs: it gathered shards over all
    ranks, and computed with values that had been written to them since."""
    seen = []
    for evaluates in (False, True):
        module = sharded(reshard_after_forward=2)
        shards = list(module[1:].parameters())
        for _ in range(2):
            module(torch.ones(2, 8)).sum().backward()
        x = torch.ones(2, 8, requires_grad=True)
        loss = module(x).sum()
        shown = module[0].weight
        if evaluates:
            with torch.no_grad():
                module(torch.ones(2, 8))
                module[1](torch.ones(2, 8))
                module[0].unshard()
                module(torch.ones(2, 8))
                assert module[0].weight.shape == (8, 8) and not isinstance(module[0].weight, DTensor)
                module[0].reshard()
            assert module[1].weight.device_mesh.shape == (2, 2)
        assert shown.device_mesh.shape == (2, 2)
        with torch.no_grad():
            for shard in shards:
                shard.mul_(10)
        loss.backward()
        seen.append(x.grad)
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@on_ranks(4)
def test_process_groups_are_made_once(rank, world):
    """Five units need as many new process groups as one, and another model on the mesh needs none."""
    made = []
    mesh = init_device_mesh("cpu", (4,))
    for layers in (5, 1):
        before = process_groups()
        module = sharded(partial(stack, layers=layers), mesh=mesh, reshard_after_forward=2)
        module(torch.ones(2, 8)).sum().backward()
        made.append(process_groups() - before)
    assert made[0] <= 2 and made[1] <= 0, made  # fewer where groups of an earlier test went in between


@api.fsdp2_only
@on_ranks(4)
def test_process_groups_do_not_follow_the_meshes_of_dtensors(rank, world):
    """The first forward made two process groups for every tensor-parallel parameter, whose DTensor mesh is an object of
    its own. The caches of DTensor replaced the mesh of an added shard on one rank only, by an equal one that was made
    before: this rank made process groups alone, and all ranks hung."""
    earlier, mesh = [init_device_mesh("cpu", (4, 1), mesh_dim_names=("rows", "tp")) for _ in range(2)]
    if rank == 0:  # operations whose results DTensor's caches remember with their mesh
        nn.Parameter(DTensor.from_local(torch.ones(2, 8), earlier["rows"], [Shard(0)], run_check=False).clone())
    module = stack()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = process_groups()
    shard_each(module, api.ours, mesh=mesh["rows"], reshard_after_forward=2)
    module[1].register_parameter("added", nn.Parameter(module[2].weight.detach().clone()))
    module(torch.ones(2, 8)).sum().backward()
    assert process_groups() - before <= 2 and module[1].added.device_mesh is module[2].weight.device_mesh


@composes("reshard to int", "hybrid sharding")
@on_ranks(4)
def test_with_a_replicate_axis(rank, world):
    """A (1, 4) mesh: replicate, then shard over four, two of them after forward."""
    mesh = mesh_of(1, 4, names=("replicate", "shard"))
    assert_parity(partial(shard_each, mesh=mesh, reshard_after_forward=2))
    small = mesh_2d()  # (2, 2): 2 is the whole axis, so nothing stays
    run = assert_parity(partial(shard_each, mesh=small, reshard_after_forward=2))
    run.module(torch.ones(2, 8))
    assert run.module[0].weight.device_mesh == small


@composes("reshard to int", "tensor parallel")
@refuses("reshard to int", "tensor parallel", by="torch", reason="parameters that are DTensors")
@on_ranks(4)
def test_tensor_parallel_parameters(rank, world):
    """DTensor parameters, which torch refuses here, stay cut over half of the data-parallel ranks."""
    mesh = mesh_of(4, 1, names=("dp", "tp"))
    build = partial(stack, layers=2)

    def prepare(module, fsdp):
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard_each(module, fsdp, mesh=mesh["dp"], reshard_after_forward=2)

    run = assert_parity(prepare, build=build, program=partial(train_and_look, 2), against=("alone",))
    torch.manual_seed(SEED)
    original = dict(build()[0].named_parameters())
    assert len(run.notes) == 6
    for step, name, _, whole in run.notes:
        if step == 0:
            assert torch.equal(whole, original[name]), name


@on_ranks(4)
def test_the_setter_changes_it(rank, world):
    """``set_reshard_after_forward`` replaces the number of ranks by all or none."""
    module = sharded(reshard_after_forward=2)
    shapes = []
    for value in (None, True, False):
        if value is not None:
            module.set_reshard_after_forward(value)
        module(torch.ones(2, 8))
        weight = module[0].weight
        shapes.append(tuple(weight.device_mesh.shape) if isinstance(weight, DTensor) else None)
        module[0].reshard()
        assert module[0].weight.device_mesh.shape == (4,)
    assert shapes == [(2, 2), (4,), None]


@api.fsdp2_only
@on_ranks(4)
def test_a_parameter_on_a_mesh_of_as_many_ranks(rank, world):
    """Its pieces would be its shards: it was kept in memory twice, with process groups of its own for that."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "pair"))["pair"]
    torch.manual_seed(SEED)
    module = nn.Linear(8, 8)
    plain = copy.deepcopy(module)
    place = lambda param: fsdp2.ShardPlacementResult(Shard(0), pairs) if param is module.weight else None
    api.ours.fully_shard(module, mesh=mesh_1d(), reshard_after_forward=2, shard_placement_fn=place)
    for model in (plain, module):
        loss = model(torch.ones(2, 8)).square().sum()
        if model is module:
            assert (module.weight.device_mesh.shape, module.bias.device_mesh.shape) == ((2,), (2, 2))
        loss.backward()
    for got, expected in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


@on_ranks(4)
def test_values(rank, world):
    """1 keeps everything, with a warning; all ranks means True."""
    with pytest.warns(UserWarning, match=r"reshard_after_forward=1 \(int\)"):
        kept = api.ours.fully_shard(nn.Linear(8, 8), mesh=mesh_1d(), reshard_after_forward=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freed = api.ours.fully_shard(nn.Linear(8, 8), mesh=mesh_1d(), reshard_after_forward=4)
    kept(torch.ones(2, 8))
    freed(torch.ones(2, 8))
    assert not isinstance(kept.weight, DTensor) and isinstance(freed.weight, DTensor)
