"""``Ranks``: what one knows all learn, over one process group or over the dimensions of a mesh in turn."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.sharding.platform import device_of
from fsdp2.weights.ranks import Ranks
from tests.support.fake import fake_mesh
from tests.support.parity import mesh_1d, mesh_2d, mesh_of, on_two_axes
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, linears, plain, values_of

CPU = torch.device("cpu")


def by_dimension() -> Ranks:
    """Return all four ranks as those of a mesh of two dimensions."""
    mesh = mesh_2d("a", "b")
    return Ranks.along(mesh, (0, 1))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["world", "dimensions"])
def test_what_ranks_tell_each_other(rank, world, kind):
    """Objects and tensors from the first to all, from all to all, and sums."""
    ranks = Ranks.world() if kind == "world" or world < 4 else by_dimension()
    assert (ranks.size, ranks.first, ranks.first_rank) == (world, rank == 0, 0)
    assert ranks.share({"from": rank}) == {"from": 0}
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bfloat16):  # pickle has no tensors of the first two
        assert torch.equal(ranks.share(torch.tensor([rank]).to(dtype)).float(), torch.zeros(1)), dtype
    assert sorted(ranks.gather(rank)) == list(range(world))
    tensor, total = torch.full((3,), rank), torch.full((2,), 2**rank)
    ranks.broadcast(tensor)
    ranks.sum(total)
    assert tensor.tolist() == [0] * 3 and total.tolist() == [2**world - 1] * 2


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["world", "dimensions"])
def test_agreeing(rank, world, kind):
    """One rank's problem is everybody's, by its own kind or the nearest that all can raise."""
    ranks = Ranks.world() if kind == "world" or world < 4 else by_dimension()
    ranks.agree(None)
    for problem, expected in (
        (ValueError("bad"), ValueError),
        (FileNotFoundError(2, "no file"), FileNotFoundError),
        (PermissionError(13, "not yours"), OSError),
        (KeyError("name"), RuntimeError),
    ):
        with pytest.raises(expected, match=f"^on rank {world - 1}: ") as caught:
            ranks.agree(problem if rank == world - 1 else None)
        assert type(caught.value) is expected
    with pytest.raises(TypeError, match="^the same$"):
        ranks.agree(TypeError("the same"))
    with pytest.raises(ValueError, match="on rank 0: mine 0\non rank 1: mine 1"):
        ranks.agree(ValueError(f"mine {rank}"))


def test_alone():
    """A process alone raises what it has, and needs no process group."""
    ranks = Ranks.alone(CPU)
    assert ranks.first and ranks.size == 1 and ranks.share(3) == 3 and ranks.gather(3) == [3]
    with pytest.raises(KeyError, match="name"):
        ranks.agree(KeyError("name"))
    assert Ranks.world().size == 1 and Ranks.of([]) is None and device_of("cpu") == CPU


@pytest.mark.parametrize("rank", [0, 1])
def test_simulated(rank):
    """Of a forecast's ranks nobody tells the others anything: each keeps what it has."""
    with fake_mesh(2, rank=rank) as mesh:
        ranks = Ranks.along(mesh, (0,))
        assert ranks.size == 2 and ranks.first == (rank == 0)
        assert ranks.share({"from": rank}) == {"from": rank}


@on_ranks(4)
def test_which_ranks_of_several_meshes(rank, world):
    """The largest mesh counts; one of all ranks is the default process group."""
    small, large = mesh_2d("a", "b")["b"], mesh_1d()
    assert Ranks.of([small, large]).lines[0][0].size == 4
    some = Ranks.of([small])
    assert (some.size, some.first, some.first_rank) == (2, rank % 2 == 0, rank // 2 * 2)
    assert Ranks.of([mesh_of(1, 4, names=("one", "four"))["one"]]).lines == ()


@on_ranks(2)
def test_a_default_process_group_for_other_devices(rank, world):
    """One of GPUs was taken for that of a mesh of CPUs, so whole values were neither saved nor loaded."""
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("shard",))
    with mock.patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl"):
        ranks = Ranks.of([mesh])
    assert ranks is not None
    assert [axis.group for axis, _ in ranks.lines] == [mesh.get_group()] != [dist.group.WORLD]


@on_ranks(4)
@pytest.mark.parametrize("meta", [False, True])
def test_models_over_the_dimensions_of_a_mesh(rank, world, tmp_path, meta):
    """What lies on some ranks has no process group of just these: dimension follows dimension."""
    with mock.patch.object(Ranks, "world", lambda *_: by_dimension()):
        values = values_of(plain("hybrid"))
        with torch.device("meta" if meta else "cpu"):
            module = linears(5, 3, 1, 8)()
        on_two_axes(module, fsdp2)
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, bucket_mb=100 / 2**20)
        assert_holds(module, values)
        fsdp2.save_safetensors(module, tmp_path, bucket_mb=100 / 2**20)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.to_local().zero_()
        fsdp2.load_safetensors(module, tmp_path)
        assert_holds(module, values)
        with pytest.raises(RuntimeError, match="on rank 3: .*Missing key.*extra.bias"):
            if rank == 3:
                module.extra = nn.Linear(2, 2)
            fsdp2.load_safetensors(module, tmp_path)
