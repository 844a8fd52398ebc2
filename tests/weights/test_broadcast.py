"""``broadcast_from_rank0``: what rank 0 has, all ranks have afterwards; or nothing changed, and all know why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.tools.check.strict import LiveBytes
from tests.support.cases import CASES
from tests.support.parity import mesh_1d, mesh_2d
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of
from tests.weights.models import assert_holds, assert_refused, plain, sharded, values_of

TINY = 100 / 2**20
"""A bucket of 96 bytes: most tensors travel in several."""


def load(name, rank, *, meta, bucket_mb=64.0, cast=None):
    """Return a sharded model that was loaded with new values, and these."""
    values = values_of(plain(name))
    if cast is not None:
        values = {key: value.to(cast) if value.is_floating_point() else value for key, value in values.items()}
    module = sharded(name, meta=meta)
    loaded = fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, bucket_mb=bucket_mb)
    assert loaded == ([], [])
    return module, values


@on_ranks(2)
@pytest.mark.parametrize("name", ["transformer", "uneven", "buffers", "channels_last"])
def test_into_memory(rank, world, name):
    """Where there is memory it is used, and is the same afterwards."""
    module, values = sharded(name, meta=False), values_of(plain(name))
    before = [parameter.to_local().data_ptr() for parameter in module.parameters()]
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert [parameter.to_local().data_ptr() for parameter in module.parameters()] == before
    assert_holds(module, values)


@on_ranks(2)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["mlp", "mixed_frozen_dtypes"])
def test_values_are_cast(rank, world, name, cast):
    """A checkpoint of another precision becomes the parameter's dtype, rounded once."""
    module, values = load(name, rank, meta=True, cast=cast, bucket_mb=TINY)
    assert_holds(module, values)


@on_ranks(2)
@pytest.mark.parametrize("given", [torch.int64, torch.int8, torch.bool])
def test_integers_load_into_floats_but_not_floats_into_integers(rank, world, given):
    """As docs/loading.md says. A fraction that an integer would lose is refused on every rank, unchanged."""
    whole = torch.arange(12).remainder(2).view(4, 3).to(given)
    layer = fsdp2.fully_shard(nn.Linear(3, 4, bias=False), mesh=mesh_1d())
    fsdp2.broadcast_from_rank0(layer, {"weight": whole} if rank == 0 else None)
    assert torch.equal(layer.weight.full_tensor(), whole.float())
    frozen = nn.Module()
    frozen.table = nn.Parameter(whole.clone(), requires_grad=False)
    fsdp2.fully_shard(frozen, mesh=mesh_1d())
    with pytest.raises(RuntimeError, match="table"):
        fsdp2.broadcast_from_rank0(frozen, {"table": torch.full((4, 3), 0.5)} if rank == 0 else None)
    assert torch.equal(frozen.table.full_tensor(), whole)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["mlp", "transformer", "used_several_times"])
def test_training_goes_on(rank, world, name):
    """Optimizers built before keep their parameters; kept full parameters do not outlive the load; attributes stay."""
    case = CASES[name]
    module = sharded(name, meta=True)
    before = list(module.parameters())
    before[0].note = "mine"
    seen = []
    before[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    reference = plain(name)
    for seed in (3, 4):
        values = values_of(plain(name), seed)
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else {})
        reference.load_state_dict(values)
        assert [id(p) for p in module.parameters()] == [id(p) for p in before]
        inputs = case.inputs(0)
        with torch.no_grad():
            torch.testing.assert_close(module(*inputs), reference(*inputs))
        loss_of(module(*inputs)).backward()
        loss_of(reference(*inputs)).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.1 * parameter.grad
        torch.testing.assert_close(module(*inputs), reference(*inputs), rtol=1e-4, atol=1e-4)
        optimizer.zero_grad()
        reference.zero_grad()
    assert before[0].note == "mine" and seen and all(seen)


# ---- ties ----


@on_ranks(2)
@pytest.mark.parametrize("given", ["first", "second", "both", "copies"])
def test_ties(rank, world, given):
    """One value is enough for a tied parameter, under any of its names."""
    module, values = sharded("transformer", meta=True), values_of(plain("transformer"))
    some = dict(values)
    if given in ("first", "second"):
        del some["head.weight" if given == "first" else "embed.weight"]
    elif given == "copies":
        some["head.weight"] = some["head.weight"].clone()
    fsdp2.broadcast_from_rank0(module, some if rank == 0 else None)
    assert module.head.weight is module.embed.weight
    assert_holds(module, values)


@on_ranks(2)
def test_ties_of_different_values(rank, world):
    """Two values for one parameter: one would be lost, so it is an error, unless asked for."""
    module, values = sharded("transformer", meta=False), values_of(plain("transformer"))
    values["head.weight"] = values["head.weight"] + 1
    assert_refused(RuntimeError, "embed.weight and head.weight are one parameter", module, values, rank)
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, strict=False)
    assert torch.equal(module.embed.weight.full_tensor(), values["head.weight"])


@on_ranks(2)
def test_ties_that_other_ranks_lack(rank, world):
    """A rank that did not tie gets the value for both names."""
    with torch.device("meta"):
        module = plain("transformer")
    if rank == 1:
        module.head.weight = nn.Parameter(torch.empty_like(module.embed.weight))
    values = values_of(plain("transformer"))
    fsdp2.broadcast_from_rank0(module, {k: v for k, v in values.items() if k != "head.weight"} if rank == 0 else {})
    assert_holds(module, values)


# ---- parts, copies and unusual modules ----


@on_ranks(2)
@pytest.mark.parametrize("part", ["0", "2", ""])
@pytest.mark.parametrize("name", ["mlp", "mlp_root_only", "mlp_grouped"])
@pytest.mark.parametrize("meta", [False, True])
def test_parts_of_a_model(rank, world, part, name, meta):
    """A unit, a module inside a unit, a member of a group: only it is loaded."""
    module, values = sharded(name, meta=meta), values_of(plain(name))
    before = {k: v.full_tensor() for k, v in module.state_dict().items() if not meta}
    target = module.get_submodule(part)
    some = {k.removeprefix(f"{part}."): v for k, v in values.items() if k.startswith(part)}
    fsdp2.broadcast_from_rank0(target, some if rank == 0 else None)
    for key, value in module.state_dict().items():
        if key.startswith(part):
            assert torch.equal(value.full_tensor(), values[key])
        else:
            assert value.is_meta if meta else torch.equal(value.full_tensor(), before[key])
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert_holds(module, values)


@on_ranks(2)
def test_parts_of_a_copy(rank, world):
    """Deep copies are loaded for themselves."""
    module, values = sharded("mlp_root_only", meta=False), values_of(plain("mlp_root_only"))
    before = module[0].weight.full_tensor()
    twin = copy.deepcopy(module)
    fsdp2.broadcast_from_rank0(twin[0], {k[2:]: v for k, v in values.items() if k[0] == "0"} if rank == 0 else None)
    assert torch.equal(twin[0].weight.full_tensor(), values["0.weight"])
    assert torch.equal(module[0].weight.full_tensor(), before)


@on_ranks(1, 2)
@pytest.mark.parametrize("meta", [False, True])
def test_a_plain_model(rank, world, meta):
    """What is not sharded gets everything."""
    with torch.device("meta" if meta and rank else "cpu"):
        module = plain("transformer")
    values = values_of(plain("transformer"))
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert_holds(module, values)


@on_ranks(4)
def test_a_mesh_of_some_ranks(rank, world):
    """The first rank of the model's mesh is its rank 0: two models on two pairs of ranks are loaded independently."""
    mesh = mesh_2d("pipeline", "shard")["shard"]
    values = values_of(plain("uneven"), seed=3 + rank // 2)
    with torch.device("meta"):
        module = plain("uneven")
    fsdp2.fully_shard(module, mesh=mesh)
    fsdp2.broadcast_from_rank0(module, values if rank % 2 == 0 else None)
    assert_holds(module, values)
    if rank // 2:
        del values["2.weight"]
    else:
        values["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="2.weight" if rank // 2 else "more"):
        fsdp2.broadcast_from_rank0(module, values if rank % 2 == 0 else None)


@on_ranks(2)
def test_prefixes_in_the_values(rank, world):
    """Keys of a compiled or checkpointed model fit as well."""
    module, values = sharded("checkpointed", meta=True), values_of(plain("checkpointed"))
    some = {f"_orig_mod.{k.replace('blocks.0.', 'blocks.0._checkpoint_wrapped_module.')}": v for k, v in values.items()}
    fsdp2.broadcast_from_rank0(module, some if rank == 0 else None)
    assert_holds(module, values)


class Scaled(nn.Linear):
    """Has extra state that is no tensor."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


@on_ranks(2)
def test_extra_state(rank, world):
    """It travels with the rest."""
    make = lambda: nn.Sequential(Scaled(3, 3), nn.Linear(3, 3))
    source, module = make(), make()
    source[0].scale = 2.5
    fsdp2.fully_shard(module, mesh=mesh_1d())
    fsdp2.broadcast_from_rank0(module, source.state_dict() if rank == 0 else None)
    assert module[0].scale == 2.5
    values = source.state_dict()
    del values["0._extra_state"]
    with pytest.raises(RuntimeError, match="Missing key.*0._extra_state"):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)


@on_ranks(2)
def test_buffers_that_no_checkpoint_holds(rank, world):
    """Non-persistent buffers stay on the meta device, and the user is told."""
    module, values = sharded("buffers", meta=True), values_of(plain("buffers"))
    with pytest.warns(UserWarning, match="non-persistent buffers.*middle.shift"):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert module.middle.shift.is_meta and not module.middle.calls.is_meta


@on_ranks(2)
def test_lazy_modules(rank, world):
    """A parameter that has no shape yet is named."""
    with pytest.raises(ValueError, match="1.weight is uninitialized"):
        fsdp2.broadcast_from_rank0(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), {})


# ---- memory ----


@on_ranks(2, 4)
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("units", ["one", "each"])
def test_memory(rank, world, meta, units):
    """Beside the shards there is one bucket, on every rank, however large the tensors are."""
    bucket = 64 << 10
    with torch.device("meta" if meta else "cpu"):
        module = nn.Sequential(*(nn.Linear(256, 384) for _ in range(4)))
    for unit in (*module, module) if units == "each" else (module,):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    values = values_of(nn.Sequential(*(nn.Linear(256, 384) for _ in range(4)))) if rank == 0 else None
    known = [parameter for parameter in module.parameters() if not parameter.is_meta]
    with LiveBytes([*known, *(values or {}).values()]) as live:
        before = live.now
        fsdp2.broadcast_from_rank0(module, values, bucket_mb=bucket / 2**20)
    shards = sum(parameter.to_local().nbytes for parameter in module.parameters())
    stays = 2 * shards if meta else 0  # counted as the flat buffer, and as storages of their own that lie in it
    assert bucket <= live.peak - before <= stays + bucket + 8192
