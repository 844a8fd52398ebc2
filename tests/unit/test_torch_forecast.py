"""What a forecast leans on of torch's fake tensors and operators still means what fsdp2 takes it to mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from fsdp2 import ShardPlacementResult
from fsdp2.sharding.mesh import listed_ranks
from fsdp2.tools.forecast.cost import _flops
from tests.support.counting import Operators
from tests.support.fake import fake_mesh
from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import probes


@probes("FakeTensor", "unset_fake_temporarily", "storage_key", "key_of")
def test_fake_tensors_have_storages_of_any_size() -> None:
    with _torch.fake_tensors():
        x = torch.empty(1 << 40, dtype=torch.uint8)
        storage = x.untyped_storage()
        assert x.device.type == "cpu" and storage.nbytes() == 1 << 40 and storage.device.type == "meta"
        assert isinstance(x, _torch.FakeTensor)
        with _torch.unset_fake_temporarily():
            assert torch.arange(3).sum() == 3
        storage.resize_(0)
        assert x.untyped_storage().nbytes() == 0
        assert _torch.key_of(storage) == _torch.storage_key(x) == _torch.storage_key(x[3:])
        assert _torch.storage_key(x) != _torch.storage_key(x.clone())


@probes("operator_schema")
def test_the_schema_of_an_operator_says_what_it_writes() -> None:
    schema = _torch.operator_schema(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.arguments[0].alias_info.is_write
    assert schema.arguments[1].alias_info is None and schema.returns[0].alias_info.is_write


@probes("fake_tensors", "makes_ranks_of_a_mesh")
def test_modules_of_fake_tensors_are_cast() -> None:
    with _torch.fake_tensors():
        linear = torch.nn.Linear(3, 3)
        weight = linear.weight
        assert linear.to(torch.bfloat16).weight is weight and weight.dtype is torch.bfloat16
    assert not _torch.makes_ranks_of_a_mesh()
    with fake_mesh(4), Operators(lambda func, args: _torch.makes_ranks_of_a_mesh()) as noted:
        init_device_mesh("cpu", (4,))
    assert noted.seen[0] is True


@probes("TorchDispatchMode", "unboxed_group", "finished_work", "FakeStore")
def test_collectives_are_operators_that_a_mode_can_replace() -> None:
    seen = []

    class Replace(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names = [argument.name for argument in _torch.operator_schema(func).arguments]
            seen.append((func.namespace, _torch.unboxed_group(args[names.index("process_group")]).size()))
            returns = _torch.operator_schema(func).returns
            out = [_torch.finished_work() if "Work" in str(value.type) else args[0] for value in returns]
            return out[0] if len(out) == 1 else tuple(out)

    with fake_mesh(4) as mesh:
        output, piece = torch.zeros(8), torch.ones(2)
        with Replace():
            dist.all_gather_into_tensor(output, piece)
            dist.all_reduce(piece)
        assert seen == [("c10d", 4)] * 2 and not output.any()
        assert _torch.unboxed_group(mesh.get_group()) is mesh.get_group()
        assert _torch.unboxed_group(mesh.get_group().group_name).size() == 4
        assert isinstance(_torch.FakeStore(), dist.Store)


def test_attention_of_fake_tensors_is_one_operator_each_way() -> None:
    with _torch.fake_tensors(), Operators(lambda func, args: _flops(func)) as noted:
        q = torch.empty(1, 2, 64, 16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert len(set(noted.seen)) == 2


@probes("without_dispatch")
def test_a_mesh_has_its_ranks_among_fake_tensors() -> None:
    with fake_mesh(4):
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
        with _torch.fake_tensors():
            with _torch.without_dispatch():
                assert mesh.mesh.flatten().tolist() == [3, 1, 0, 2]
            assert listed_ranks(mesh) == [3, 1, 0, 2]


@probes("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
def test_what_depends_on_values_raises() -> None:
    with _torch.fake_tensors():
        x = torch.empty(3)
        for error, call in (
            (_torch.DataDependentOutputException, x.sum().item),
            (_torch.DynamicOutputShapeException, x.nonzero),
        ):
            with pytest.raises(error) as raised:
                call()
            assert "aten" in str(raised.value.func)
    assert issubclass(_torch.UnsupportedOperatorException, RuntimeError)


@probes("torch_placement")
def test_a_mesh_for_parameters_in_torchs_words() -> None:
    """A result without a mesh, or with that of the unit, needs no mesh; parameters on another one form one group."""
    with fake_mesh(2, 2, names=("half", "other")) as mesh:
        whole, half = mesh._flatten("all"), mesh["half"]
        dims = {8: 0, 4: 1}
        places = {
            "no mesh": lambda p: Shard(dims[p.shape[0]]),
            "the unit's": lambda p: ShardPlacementResult(Shard(dims[p.shape[0]]), whole),
            "another": lambda p: ShardPlacementResult(Shard(dims[p.shape[0]]), half),
        }
        for name, place in places.items():
            module = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
            if name == "another" and not hasattr(_fsdp_common, "ShardPlacementResult"):
                with pytest.raises(NotImplementedError, match="returned a mesh for a parameter"):
                    torch_fsdp.fully_shard(module, mesh=whole, shard_placement_fn=_torch.torch_placement(place, whole))
                continue
            torch_fsdp.fully_shard(module, mesh=whole, shard_placement_fn=_torch.torch_placement(place, whole))
            for weight, dim in ((module[0].weight, 0), (module[1].weight, 1)):
                assert weight.placements == (Shard(dim),)
                assert weight.device_mesh == (half if name == "another" else whole)
