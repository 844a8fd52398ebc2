"""What equal pieces waste: bounded, reported, and avoided by ``shard_placement_fn="auto"``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from tests.support import api
from tests.support.fake import fake_mesh
from tests.support.inside import shard_bytes
from tests.support.parity import assert_parity, mesh_1d, mesh_2d
from tests.support.pool import on_ranks

ALIGNMENT = 16
ODD = [3, 5, 7, 12]


class Experts(nn.Module):
    """Stacked weights of experts, as grouped matrix products want them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x):
        return torch.einsum("bw,ewh,ehv->bv", x, self.up, self.down)


def least(shape: tuple[int, ...], ranks: int) -> int:
    """Return the padding, in elements, of the best of all cuts, counted by torch.chunk."""
    found = []
    for dim in range(len(shape)):
        pieces = torch.empty(shape, device="meta").chunk(ranks, dim)
        found.append(ranks * pieces[0].numel() - torch.Size(shape).numel())
    return min(found)


@pytest.mark.parametrize("placement", [None, "auto"])
def test_more_ranks_than_experts(placement) -> None:
    """128 experts on 256 ranks: half the ranks would hold nothing but padding."""
    with fake_mesh(256) as mesh:
        with torch.device("meta"):
            experts = Experts(128, 1024, 768)
        fsdp2.fully_shard(experts, mesh=mesh, shard_placement_fn=placement)
        ((unit, ranks, parameters, padding),) = report = fsdp2.padding_report(experts)
        assert (unit, ranks, parameters) == ("", 256, 2 * 128 * 1024 * 768 * 4)
        if placement is None:
            assert padding == parameters
            assert experts.up.placements == experts.down.placements == (Shard(0),)
            assert "up (128, 1024, 768): Shard(0) pads 100.0%; Shard(1) would pad 0.0%" in str(report)
        else:
            assert padding == 0
            assert experts.up.placements == experts.down.placements == (Shard(1),)
            assert "pads" not in str(report)


@pytest.mark.parametrize("ranks", [*ODD, 256])
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(1,), (2, 3), (5, 1, 2), (7,), (1, 1)], id="tiny"),
        pytest.param([(13, 50), (50, 13), (101,), (3, 3, 64, 64), (17, 19, 23)], id="odd"),
        pytest.param([(128, 96, 64), (128, 64, 96), (128, 96)], id="experts"),
    ],
)
def test_padding_is_bounded(ranks: int, shapes) -> None:
    """No more than the best cut of each parameter wastes, and 16 bytes for each piece of it."""
    with fake_mesh(ranks) as mesh:
        module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        module.forward = lambda: None
        unit = nn.Sequential()
        unit.weights = module
        fsdp2.fully_shard(unit, mesh=mesh, shard_placement_fn="auto")
        ((_, _, parameters, padding),) = fsdp2.padding_report(unit)
        assert parameters == 4 * sum(torch.Size(shape).numel() for shape in shapes)
        uneven = 4 * sum(least(shape, ranks) for shape in shapes)
        assert uneven <= padding <= uneven + (ALIGNMENT - 4) * ranks * len(shapes)
        assert ranks * shard_bytes(unit) == parameters + padding
        assert shard_bytes(unit) % ALIGNMENT == 0
        for parameter in unit.parameters():
            assert parameter.to_local().data_ptr() % ALIGNMENT == 0


def test_the_report_as_a_table() -> None:
    """Units below the module in its order, each with what it holds; no word on what wastes little."""
    with fake_mesh(8) as mesh:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 9), nn.LayerNorm(9))
        for layer in (model[0], model[1], model):
            fsdp2.fully_shard(layer, mesh=mesh)
        report = fsdp2.padding_report(model)
        assert [entry[:3] for entry in report] == [("0", 8, 4 * 65 * 64), ("1", 8, 4 * 65 * 9), ("", 8, 4 * 2 * 9)]
        lines = str(report).splitlines()
        assert lines[0].split() == ["unit", "ranks", "parameters", "padding"]
        assert lines[1].split() == ["0", "8", "0.02", "MiB", "0.00", "MiB", "0.0%"]
        assert lines[3].strip() == "1.weight (9, 64): Shard(0) pads 77.8%; Shard(1) would pad 0.0%"
        assert lines[4].strip() == "1.bias (9,): Shard(0) pads 77.8%"
        assert lines[5].split() == ["(root)", "8", "0.00", "MiB", "0.00", "MiB", "255.6%"]  # of 72 bytes
        assert fsdp2.padding_report(model[1])[0] == ("", *report[1][1:])
    with pytest.raises(ValueError, match="no parameter of Linear is managed"):
        fsdp2.padding_report(nn.Linear(2, 2))


@pytest.mark.parametrize(("size", "named"), [(20, True), (27, False)])
def test_what_pads_a_twentieth_is_named(size: int, named: bool) -> None:
    """On 7 ranks, 20 elements are padded to 21, and 27 to 28."""
    with fake_mesh(7) as mesh:
        module = nn.LayerNorm(size, bias=False)
        fsdp2.fully_shard(module, mesh=mesh)
        assert ("Shard(0) pads 5.0%" in str(fsdp2.padding_report(module))) == named


def test_shards_over_replicas_are_padded_on_all_ranks() -> None:
    """The report counted the ranks of the shard axis only, although each of them keeps just a part of its piece.

    10 experts over 8 ranks are padded to 16. In four replicas, the first five ranks of each have two experts to share
    over the replicas, which takes 20 in all; the others have none. A scalar, which all ranks hold whole, is apart.
    """
    sizes, found = [], []
    for rank in range(32):
        with fake_mesh(4, 8, names=("replicate", "shard"), rank=rank) as mesh:
            experts = Experts(10, 64, 48)
            experts.scale = nn.Parameter(torch.ones(()))
            fsdp2.fully_shard(experts, mesh=mesh, shard_over_replicas=True)
            sizes.append(shard_bytes(experts))
            found.append(fsdp2.padding_report(experts))
    ((_, ranks, parameters, padding), scale) = report = found[0]
    assert all(other == report for other in found)
    experts = 2 * 10 * 64 * 48 * 4
    assert (ranks, parameters, padding) == (32, experts, experts)
    assert scale == ("", 1, 4, ALIGNMENT - 4)
    assert parameters + padding + 32 * ALIGNMENT == sum(sizes)
    assert "up (10, 64, 48): Shard(0) pads 100.0%; Shard(1) would pad 0.0%" in str(report)
    with fake_mesh(4, 8, names=("replicate", "shard")) as mesh:
        experts = Experts(10, 64, 48)
        fsdp2.fully_shard(experts, mesh=mesh, shard_over_replicas=True, shard_placement_fn="auto")
        assert fsdp2.padding_report(experts)[0].padding == 0


@on_ranks(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_cut_chosen_by_padding_trains_alike(rank, world, hybrid):
    """Results are those of torch's with the same dimensions by hand, and of one process."""
    mesh = mesh_2d() if hybrid else mesh_1d()
    alone = mesh.size(mesh.ndim - 1) == 1  # nothing is padded then, so the first dimension is taken

    def by_hand(parameter: nn.Parameter) -> Shard:
        return Shard(0 if alone else list(parameter.shape).index(8))

    def prepare(module, fsdp) -> None:
        fsdp.fully_shard(module, mesh=mesh, shard_placement_fn="auto" if fsdp is api.ours else by_hand)

    run = assert_parity(prepare, build=lambda: Experts(3, 8, 5))
    before = (Replicate(),) if hybrid else ()
    assert run.module.up.placements == (*before, Shard(0 if alone else 1))
    assert run.module.down.placements == (*before, Shard(0 if alone else 2))


class Rows(nn.Module):
    """The same experts, kept as rows of one matrix and viewed where they are used."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.randn(experts * width, hidden))
        self.down = nn.Parameter(torch.randn(experts * hidden, width))

    def forward(self, x):
        up, down = (weight.unflatten(0, (self.experts, -1)) for weight in (self.up, self.down))
        return torch.einsum("bw,ewh,ehv->bv", x, up, down)


def test_160_experts_over_64_ranks() -> None:
    """A tenth and more of the memory may be padding, and ranks may hold nothing. Another dimension cuts them evenly;
    rows of one matrix do, too, and are gathered without a copy."""
    with fake_mesh(64) as mesh:
        for kind, placement, share in ((Experts, None, 0.2), (Experts, "auto", 0.0), (Rows, None, 0.0)):
            with torch.device("meta"):
                experts = kind(160, 1408, 512)
            fsdp2.fully_shard(experts, mesh=mesh, shard_placement_fn=placement)
            ((_, _, parameters, padding),) = fsdp2.padding_report(experts)
            assert padding == share * parameters
            cut = [parameter.placements == (Shard(0),) for parameter in experts.parameters()]
            assert cut == [placement != "auto"] * 2  # then what is gathered lies as the whole does


@on_ranks(4)
@pytest.mark.parametrize("kept", ["auto", "rows"])
def test_uneven_experts(rank, world, tmp_path, kept):
    """10 experts over 4 ranks, in equal pieces: they train like one process, and their values go through whole state
    dicts, files and checkpoints of one process and of another cut."""
    build = (lambda: Experts(10, 8, 4)) if kept == "auto" else (lambda: Rows(10, 8, 4))
    placement = "auto" if kept == "auto" else None

    def prepare(module, fsdp) -> None:
        fsdp.fully_shard(module, mesh=mesh_1d(), shard_placement_fn=placement)

    module = assert_parity(prepare, build=build, against=("alone",)).module
    assert fsdp2.padding_report(module)[0].padding == 0
    assert {parameter.to_local().numel() for parameter in module.parameters()} == {10 * 8 * 4 // 4}
    plain, other = build(), fsdp2.fully_shard(build(), mesh=mesh_1d())
    values = {name: value.full_tensor() for name, value in module.state_dict().items()}
    plain.load_state_dict(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in values.items())
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    other.load_state_dict(state)
    assert all(torch.equal(values[name], value.full_tensor()) for name, value in other.state_dict().items())
    fsdp2.save_safetensors(other, tmp_path / "files")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    fsdp2.load_safetensors(module, tmp_path / "files")
    assert all(torch.equal(values[name], value.full_tensor()) for name, value in module.state_dict().items())


class BlockShard:
    """A stand-in for the placement that torch's main has."""


@on_ranks(1)
def test_placements_of_merged_dimensions_are_refused(rank, world):
    """The error says what to use instead."""
    with pytest.raises(ValueError, match='shard_placement_fn="auto"'):
        fsdp2.fully_shard(nn.Linear(2, 2), mesh=mesh_1d(), shard_placement_fn=lambda parameter: BlockShard())
