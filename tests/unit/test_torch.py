"""Every private torch symbol that fsdp2 leans on still means what fsdp2 takes it to mean."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.api import torch_since
from tests.support.counting import Operators
from tests.support.fake import fake_mesh
from tests.unit import (
    test_torch_collectives,
    test_torch_forecast,
    test_torch_helpers,
    test_torch_imports,
    test_torch_optimizers,
)
from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import PROBED, probes


def test_every_symbol_has_a_probe() -> None:
    # These have their parts of the probes.
    assert test_torch_collectives and test_torch_helpers and test_torch_optimizers and test_torch_forecast
    assert test_torch_imports
    assert sorted(PROBED) == sorted(vars(_torch))


# ---- composable APIs ----


@probes("REGISTRY_KEY", "STATE_KEY", "RegistryItem", "TorchFSDPState", "torch_fully_shard")
def test_torch_keeps_state_and_registry_of_a_module_under_these_keys() -> None:
    module = nn.Linear(2, 2)
    with fake_mesh(2) as mesh:
        torch_fsdp.fully_shard(module, mesh=mesh)
    registry = module.__dict__[_torch.REGISTRY_KEY]
    assert isinstance(registry["fully_shard"], _torch.RegistryItem)
    state = module.__dict__[_torch.STATE_KEY][_torch.torch_fully_shard]
    assert isinstance(state, _torch.TorchFSDPState)
    assert torch_fsdp.fully_shard.state(module) is state is _torch.composable_state(module)


@pytest.mark.parametrize("api", [torch_fsdp.fully_shard, replicate], ids=["fully_shard", "replicate"])
def test_torch_refuses_a_module_with_our_entry_in_the_registry(api: Callable[..., Any]) -> None:
    module = nn.Linear(2, 2)
    module.__dict__[_torch.REGISTRY_KEY] = {"fully_shard": _torch.RegistryItem()}
    with fake_mesh(2), pytest.raises((AssertionError, RuntimeError), match=r"fully_shard|distributed API"):
        api(module)


@probes("composable_state", "insert_composable_state", "ComposableState")
def test_a_state_is_found_by_its_module_and_kept_weakly() -> None:
    module, state = nn.Linear(2, 2), _torch.ComposableState()
    assert _torch.composable_state(module) is None
    _torch.insert_composable_state(module, state)
    assert _torch.composable_state(module) is state
    with pytest.raises(AssertionError, match="more than once"):
        _torch.insert_composable_state(module, state)
    del state
    gc.collect()
    with pytest.raises(AssertionError, match="garbage collected"):
        _torch.composable_state(module)


@probes("TrainingState", "ShardedState", "ParamModuleInfo")
def test_phases_residencies_and_places_have_names() -> None:
    assert {state.name for state in _torch.TrainingState} == {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"}
    assert {state.name for state in _torch.ShardedState} == {"SHARDED", "SHARDED_POST_FORWARD", "UNSHARDED"}
    module = nn.Linear(1, 1)
    place = _torch.ParamModuleInfo(module, "weight", [module], ["bias"])
    assert (place.module, place.param_name) == (module, "weight")
    assert (place.shared_modules, place.shared_param_names) == ([module], ["bias"])


# ---- meshes and DTensors ----


@probes("concatenate_meshes", "flatten_mesh")
def test_meshes_are_put_together_and_flattened() -> None:
    with fake_mesh(2, 2, 2, names=("dp", "cp", "tp"), rank=5) as mesh:
        flat = _torch.flatten_mesh(mesh["dp", "cp"])
        assert flat.mesh.tolist() == [1, 3, 5, 7] and flat.get_group().size() == 4
        both = _torch.concatenate_meshes([flat, mesh["tp"]])
        assert both.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and both.get_coordinate() == (2, 1)
        assert both.get_group(0).name() == flat.get_group().name()


@probes("mesh_order")
def test_a_mesh_says_whether_its_process_groups_keep_its_order() -> None:
    keeps: dict[str, Any] = {"preserve_rank_order": True}
    with fake_mesh(2, rank=1) as mesh:
        assert _torch.mesh_order(mesh) == {}
        if "preserve_rank_order" in inspect.signature(DeviceMesh.__init__).parameters:
            permuted = DeviceMesh("cpu", [1, 0], **keeps)
            assert _torch.mesh_order(permuted) == keeps
            assert permuted.get_group().rank() == 0


@probes("explicit_grad_dtype")
def test_a_parameter_is_asked_whether_its_gradients_dtype_was_chosen() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert _torch.explicit_grad_dtype(param) == ()
    for dtype in (torch.float32, None):
        param.grad_dtype = dtype
        assert _torch.explicit_grad_dtype(param) == (dtype,)
    param.grad_dtype = torch.bfloat16
    assert _torch.explicit_grad_dtype(param) == ((torch.bfloat16,) if torch_since("2.15") else ())
    param.grad_dtype = None
    param.grad = torch.ones(2)
    (param * 1.0078125).sum().backward()
    assert param.grad.tolist() == [2.0078125, 2.0078125]  # added in place, in the wider dtype that was there


def test_torchs_placement_result_knows_its_mesh_and_dimensions_their_names() -> None:
    if not torch_since("2.12"):
        return
    assert torch.distributed.fsdp.DataParallelMeshDims(shard=("a", "b")).shard_names == ("a", "b")
    with fake_mesh(2) as mesh:
        result = _fsdp_common.ShardPlacementResult(Shard(1), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))
        assert result.placement == Shard(1) and result.mesh_info.mesh is mesh


@probes("as_parameter")
def test_a_dtensor_is_made_a_parameter_itself() -> None:
    """As ``nn.Parameter`` makes an alias of one: a module takes it."""
    with fake_mesh(2) as mesh:
        for requires_grad in (True, False):
            shard = DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False)
            made = _torch.as_parameter(shard, requires_grad=requires_grad)
            usual = nn.Parameter(shard, requires_grad=requires_grad)
            assert made is shard and isinstance(made, nn.Parameter) and made.is_leaf
            assert made.requires_grad is requires_grad and made.__dict__.keys() == usual.__dict__.keys()
            module = nn.Module()
            module.weight = made
            assert module._parameters["weight"] is made


@probes("DTensorSpec", "TensorMeta", "dtensor_from_local", "local_tensor", "set_local_tensor", "dtensor_spec")
def test_a_dtensor_is_made_around_a_tensor_itself() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        meta = _torch.TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
        spec = _torch.DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta)
        assert spec.num_shards_map == [4, -1] or spec.num_shards_map == [4, 1]
        local, other = torch.zeros(2, 3), torch.ones(2, 3)
        made = _torch.dtensor_from_local(local, spec)
        assert _torch.local_tensor(made) is local and _torch.dtensor_spec(made) is spec
        assert (made.shape, made.stride(), made.dtype, made.requires_grad) == ((8, 3), (3, 1), torch.float32, False)
        again = _torch.dtensor_from_local(local, spec)
        assert type(again) is DTensor and _torch.local_tensor(again) is local and not again.requires_grad
        _torch.set_local_tensor(made, other)
        assert _torch.local_tensor(made) is other and torch.equal(made.to_local(), other)
        double = replace(spec, tensor_meta=_torch.TensorMeta(meta.shape, meta.stride, torch.float64))
        assert _torch.dtensor_from_local(local.double(), double).dtype is torch.float64
        assert spec == _torch.DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta) and spec != double


def test_a_parameter_around_a_dtensor_keeps_identity_of_a_new_local_tensor() -> None:
    with fake_mesh(2) as mesh:
        param = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False))
        local = torch.ones(2)
        _torch.set_local_tensor(param, local)
        assert _torch.local_tensor(param) is local and param.data.to_local().tolist() == [1.0, 1.0]


@probes("share_memory_of_complex_views")
def test_views_of_complex_dtensors_share_their_memory() -> None:
    _torch.share_memory_of_complex_views()
    with fake_mesh(4) as mesh:
        for shape, place in (((5, 3), Shard(1)), ((1,), Shard(0)), ((), Replicate())):
            value = DTensor.from_local(torch.zeros(shape, dtype=torch.complex64), mesh, (place,), run_check=False)
            real = torch.view_as_real(value)
            assert (real.shape, real.dtype, real.placements) == ((*value.shape, 2), torch.float32, value.placements)
            again = torch.view_as_complex(real)
            assert (again.shape, again.dtype, again.placements) == (value.shape, value.dtype, value.placements)
            assert (real.stride()[-1], again.stride()) == (1, value.stride())
            with torch.no_grad():
                real += 1
            assert value._version == 1 and bool((again.to_local() == 1 + 1j).all())
        pairs = DTensor.from_local(torch.zeros(3, 1), mesh, (Shard(1),), run_check=False, shape=(3, 2), stride=(2, 1))
        assert torch.view_as_complex(pairs).placements == (Replicate(),)


@probes("StridedShard")
def test_a_strided_shard_is_cut_after_the_dimensions_to_its_right() -> None:
    starts = {}
    for rank in range(4):
        with fake_mesh(2, 2, names=("dp", "tp"), rank=rank) as mesh:
            placements = (_torch.StridedShard(0, split_factor=2), Shard(0))
            (rows, _), (start, _) = compute_local_shape_and_global_offset((8, 3), mesh, placements)
            starts[tuple(mesh.get_coordinate())] = (rows, start)
    assert starts == {(0, 0): (2, 0), (1, 0): (2, 2), (0, 1): (2, 4), (1, 1): (2, 6)}
    one = _torch.StridedShard(1, split_factor=4)
    assert (one.dim, one.split_factor) == (1, 4) and one != Shard(1) and not isinstance(one, Replicate)


# ---- autograd ----


@probes("graph_task_id", "queue_end_of_backward")
def test_a_running_backward_has_an_id_and_an_end() -> None:
    log, leaf = [], torch.ones(2, requires_grad=True)

    def inside(grad: Tensor) -> None:
        log.append(_torch.graph_task_id())
        _torch.queue_end_of_backward(lambda: log.append(leaf.grad.tolist()))

    output = leaf * 2
    output.register_hook(inside)
    assert _torch.graph_task_id() == -1
    output.sum().backward()
    assert _torch.graph_task_id() == -1
    assert log[0] >= 0 and log[1:] == [[2.0, 2.0]]


@probes("will_accumulate")
def test_a_running_backward_knows_which_leaves_it_reaches() -> None:
    log, leaves = {}, [torch.ones(2, requires_grad=True) for _ in range(2)]
    output = leaves[0] * 2
    output.register_hook(lambda grad: log.update({i: _torch.will_accumulate(leaf) for i, leaf in enumerate(leaves)}))
    output.sum().backward()
    assert log == {0: True, 1: False}


@probes("autograd_sequence_number", "is_made_since")
def test_nodes_are_numbered_in_the_order_of_their_making() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before = leaf * 2
    since = _torch.autograd_sequence_number()
    after = before * 2
    assert not _torch.is_made_since(before.grad_fn, since)
    assert _torch.is_made_since(after.grad_fn, since) and _torch.is_made_since(after.grad_fn, since - 1)
    assert not _torch.is_made_since(leaf.grad_fn, since)


@probes("entries_from_elsewhere")
def test_the_way_from_another_device_is_found() -> None:
    """The two devices of a CPU: of what lies on ``meta``, nothing is computed."""
    leaf, home = torch.ones(2, requires_grad=True), torch.device("cpu")
    before = leaf * 2
    since = _torch.autograd_sequence_number()
    left, right = before.sin().chunk(2)
    away = torch.cat([left.to("meta"), right.to("meta")]).cos()
    chunk = left.grad_fn
    found = _torch.entries_from_elsewhere(away, home, since)
    assert sorted(found, key=lambda entry: entry[1]) == [(chunk, 0), (right.grad_fn, 1)]
    assert _torch.entries_from_elsewhere(left, home, since) == [(chunk, 0)]
    assert not _torch.entries_from_elsewhere(leaf.to("meta") * 2, home, since)  # a leaf's node outlives the graph
    assert not _torch.entries_from_elsewhere(away, home, _torch.autograd_sequence_number())


@probes("gradient_hooks", "have_gradient_hooks")
def test_the_hooks_of_a_tensor_are_found_in_order() -> None:
    tensor, hooks = torch.ones(2, requires_grad=True), [lambda t: None for _ in range(4)]
    assert _torch.gradient_hooks(tensor) is None and not _torch.have_gradient_hooks([tensor, tensor])
    handles = [tensor.register_hook(hook) for hook in hooks[:2]]
    handles += [tensor.register_post_accumulate_grad_hook(hook) for hook in hooks[2:]]
    assert _torch.gradient_hooks(tensor) == (hooks[:2], hooks[2:])
    assert all(_torch.have_gradient_hooks([torch.ones(1), one]) for one in (tensor, _with_later_hook()))
    assert [handle.remove() for handle in handles] == [None] * 4
    assert _torch.gradient_hooks(tensor) is None and not _torch.have_gradient_hooks([tensor])


@probes("gradient_hook_tables", "share_gradient_hooks")
@pytest.mark.parametrize("frozen", [False, True])
def test_hooks_of_another_tensor_run_until_their_handles_remove_them(frozen: bool) -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=not frozen)
    assert _torch.gradient_hook_tables(first) == (None, None)
    seen: list[list[float]] = []
    handles = [first.register_hook(lambda grad: grad * 2)]
    handles.append(first.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.tolist())))
    _torch.share_gradient_hooks(second, _torch.gradient_hook_tables(first))
    del first
    assert second.requires_grad is not frozen
    second.requires_grad_().sum().backward()
    assert [handle.remove() for handle in handles] == [None] * 2
    second.sum().backward()
    assert seen == [[2.0, 2.0]] and second.grad.tolist() == [3.0, 3.0]
    assert _torch.gradient_hooks(second) is None


def _with_later_hook() -> Tensor:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda t: None)
    return tensor


def test_a_dtensor_has_its_local_tensor_until_it_is_swapped() -> None:
    with fake_mesh(2) as mesh:
        first, second = (DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False) for _ in range(2))
        pieces = [_torch.local_tensor(first), _torch.local_tensor(second)]
        assert _torch.local_tensor(first) is pieces[0]
        torch.utils.swap_tensors(first, second)
        assert _torch.local_tensor(first) is pieces[1]


class _Wrapped(torch.Tensor):
    """A tensor class that keeps another tensor inside."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> _Wrapped:
        return _torch.wrapper_of(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, *unused: Any) -> Any:
        raise AssertionError("no operator is called")


@probes("wrapper_of")
def test_a_wrapper_has_the_metadata_of_its_tensor() -> None:
    wrapped = _Wrapped(torch.zeros(2, 3, dtype=torch.float64).t())
    assert type(wrapped) is _Wrapped and wrapped.dtype is torch.float64
    assert wrapped.shape == (3, 2) and wrapped.stride() == (1, 3) and wrapped.untyped_storage().nbytes() == 48


@probes("set_versions", "uncount_write", "versions_of")
def test_changes_in_place_are_counted_also_through_views_and_dtensors() -> None:
    tensor = torch.zeros(4)
    tensor[:2].add_(1)
    assert _torch.versions_of([tensor])[0] == 1
    torch.no_grad()(tensor.mul_)(2)
    assert _torch.versions_of([tensor]) == [2]
    _torch.uncount_write(tensor)
    assert _torch.versions_of([tensor]) == [1]
    _torch.set_versions([tensor, other := torch.zeros(1)], [5, 1 << 30])
    assert _torch.versions_of([tensor[1:], other]) == [5, 1 << 30]
    weight, inputs = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    result = inputs * weight.view(2)
    _torch.set_versions([weight], [1 << 30])
    with pytest.raises(RuntimeError, match="is at version 1073741824; expected version 0"):
        result.sum().backward()
    _torch.set_versions([tensor], [1])
    assert _torch.versions_of([tensor.data])[0] == 0
    assert _torch.versions_of([torch.inference_mode()(torch.zeros)(1)])[0] == -1
    with fake_mesh(2) as mesh:
        param = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False))
        before = _torch.versions_of([param])[0]
        torch.no_grad()(param.add_)(1)
        assert _torch.versions_of([param])[0] > before


@probes("storages_of", "lies_in")
def test_data_assigned_shows_in_the_storage_alone() -> None:
    with fake_mesh(2) as mesh:
        param = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False))
        before = _torch.storages_of([param])
        param.data = param.data
        torch.no_grad()(param.add_)(1)
        assert _torch.storages_of([param]) == before
        version, local = param._version, param._local_tensor
        param.data = param.data * 2
        assert _torch.storages_of([param]) != before
        assert param._version == version and param._local_tensor is local
    whole = torch.zeros(4)
    assert _torch.lies_in(whole[1:].detach().view(3, 1), whole.untyped_storage())
    assert not _torch.lies_in(whole.clone(), whole.untyped_storage())
    assert not _torch.lies_in(whole.to_sparse(), whole.untyped_storage())


@probes("memory_of")
def test_tensors_of_one_memory_are_known_when_it_is_gone() -> None:
    whole = torch.zeros(4, 2)
    alike, memory = whole.detach(), _torch.memory_of(whole)
    assert memory is not None and memory == _torch.memory_of(alike)
    others = [whole[1:], whole.t(), whole.clone(), whole[:0], whole.to("meta"), whole.to_sparse()]
    assert memory not in [_torch.memory_of(other) for other in others]
    with _torch.fake_tensors():
        fake = torch.zeros(4, 2)
        assert _torch.memory_of(fake) == _torch.memory_of(fake.detach()) != _torch.memory_of(torch.zeros(4, 2))
    del whole, alike, others
    assert memory[0].expired()
    later = [torch.zeros(4, 2) for _ in range(100)]  # of which one gets the address of the first
    assert memory not in map(_torch.memory_of, later)


@probes("address_of")
def test_addresses_of_tensors_with_and_without_memory() -> None:
    real = torch.zeros(4)
    assert _torch.address_of(real[1:]) == real.data_ptr() + 4
    with _torch.fake_tensors():
        fake, other = torch.zeros(4), torch.zeros(4)
        assert _torch.address_of(fake[1:]) == _torch.address_of(fake) + 4
        assert abs(_torch.address_of(other) - _torch.address_of(fake)) >= 1 << 48


@probes("current_key")
def test_only_cuda_has_a_current_stream_to_ask_for() -> None:
    assert _torch.current_key(torch.device("cpu")) is None
    key = _torch.current_key(torch.device("cuda", 0))
    assert (key is None) == (not hasattr(torch._C, "_cuda_getCurrentRawStream"))
    if torch.cuda.is_available():
        assert key is not None and key() == torch.cuda.current_stream(0).cuda_stream


@probes("plain_tensors_replicated", "takes_plain_tensors")
def test_plain_tensors_are_replicated_in_a_block(mesh: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    for outer in (False, True):
        with _torch.plain_tensors_replicated() if outer else contextlib.nullcontext():
            assert _torch.takes_plain_tensors() is outer
            with _torch.plain_tensors_replicated():
                assert (sharded * torch.ones(8, 4)).placements == (Shard(0),) and _torch.takes_plain_tensors()
            with contextlib.nullcontext() if outer else pytest.raises(RuntimeError, match="mixed"):
                sharded * torch.ones(8, 4)


@probes("makes_view", "written_by")
def test_what_an_operator_writes_and_views() -> None:
    aten, x, y = torch.ops.aten, torch.ones(2), torch.ones(2)
    assert _torch.written_by(aten.add_.Tensor, (x, y)) == [x] and _torch.written_by(aten.add.Tensor, (x, y)) == []
    assert _torch.written_by(aten.select.int, (x, 0, 0)) == []
    views = (aten.select.int, aten.slice.Tensor, aten.view.default, aten.detach.default, aten.split.Tensor)
    assert all(map(_torch.makes_view, views))
    assert not any(map(_torch.makes_view, (aten.add.Tensor, aten.add_.Tensor, aten.clone.default)))


@probes("python_attributes")
def test_what_users_stored_is_told_from_what_a_dtensor_needs() -> None:
    with fake_mesh(2) as mesh:
        sharded = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False))
        for param in (nn.Parameter(torch.zeros(2)), sharded):
            assert _torch.python_attributes(param) == {}
            param.tag = "kept"
            assert _torch.python_attributes(param) == {"tag": "kept"}


@probes("profiler_running")
def test_a_running_profiler_is_noticed() -> None:
    assert not _torch.profiler_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.profiler_running()
    assert not _torch.profiler_running()


# ---- kernels, transforms, compilation, modules ----


@probes("chunk_cat")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunks_of_several_tensors_make_rows_padded_with_zeros_and_cast(dtype: torch.dtype) -> None:
    out = torch.full((4, 6), 9.0, dtype=dtype)
    _torch.chunk_cat([torch.arange(1.0, 11).view(5, 2), torch.arange(1.0, 6)], 0, 4, out=out)
    assert out.tolist() == [[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 3, 4], [9, 10, 0, 0, 5, 0], [0, 0, 0, 0, 0, 0]]


@probes("lasting_tensors")
def test_tensors_that_outlive_the_modes_around_them() -> None:
    made = []

    def function(x: Tensor) -> Tensor:
        with _torch.lasting_tensors():
            made.append(torch.ones(2).requires_grad_())
        return 2 * x

    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))
    with torch.inference_mode():
        function(torch.ones(2))
    for tensor in made:
        assert tensor.untyped_storage().nbytes() == 8 and tensor.requires_grad and not tensor.is_inference()
    with pytest.raises(RuntimeError, match="requires_grad_"):  # as before the block
        torch.func.jvp(lambda x: torch.ones(2).requires_grad_() * x, (torch.ones(2),), (torch.ones(2),))


@probes("tangents_of")
def test_tangents_of_dual_numbers() -> None:
    plain, tangent = torch.ones(2), torch.full((2,), 3.0)
    assert _torch.tangents_of([plain]) == []
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(plain, tangent)
        (found,) = _torch.tangents_of([torch.zeros(2), dual])
        assert torch.equal(found, tangent)


@probes("needs_gradient", "in_each_transform")
def test_gradients_that_only_an_outer_transform_asks_for() -> None:
    found: list[tuple[bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        found.append((x.requires_grad, _torch.needs_gradient(x)))
        assert any(one.requires_grad for one in _torch.in_each_transform(x)) == _torch.needs_gradient(x)
        return x.sum()

    rows = torch.ones(1, 2)
    note(rows)
    torch.func.vmap(note)(rows)
    torch.func.grad(note)(rows)
    torch.func.grad(lambda x: torch.func.vmap(note)(x).sum())(rows)
    torch.func.vmap(note)(rows.clone().requires_grad_())
    assert found == [(False, False), (False, False), (True, True), (False, True), (False, True)]


@probes("fakes_results")
def test_operators_that_compute_nothing() -> None:
    assert not _torch.fakes_results()
    with FakeTensorMode():
        assert _torch.fakes_results()


@probes("is_exporting")
def test_forwards_that_torch_writes_down() -> None:
    asked = []

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(_torch.is_exporting())
            return x + 1

    module, data = Asks(), torch.ones(2)
    module(data)
    torch.jit.trace(module, data, check_trace=False)
    torch.export.export(module, (data,), strict=False)
    make_fx(lambda x: module(x))(data)
    assert asked[0] is False
    assert len(asked) >= 4
    assert all(asked[1:])


@probes("hooks_of_saved_tensors")
def test_hooks_of_what_is_saved_now() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert _torch.hooks_of_saved_tensors() is None
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _torch.hooks_of_saved_tensors() == (pack, unpack)
    assert _torch.hooks_of_saved_tensors() is None


@probes("clones_before_writes")
def test_saved_tensors_that_are_cloned_before_writes() -> None:
    assert not _torch.clones_before_writes()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert _torch.clones_before_writes()


@probes("without_functorch", "functorch_active")
def test_functorch_is_off_inside_and_on_again_behind() -> None:
    def outside() -> bool:
        with _torch.without_functorch():
            made = torch.zeros(2)
            made.untyped_storage().resize_(0)  # refused for a wrapped tensor
            return torch._C._functorch.is_functorch_wrapped_tensor(made)

    def function(x: Tensor) -> Tensor:
        seen.append(outside())
        seen.append(torch._C._functorch.is_functorch_wrapped_tensor(torch.zeros(2)) and _torch.functorch_active())
        return x.square().sum()

    seen: list[bool] = []
    torch.func.grad(function)(torch.ones(2))
    assert seen == [False, True] and not outside() and not _torch.functorch_active()


@probes("outside_dynamo")
def test_compilation_breaks_at_what_is_outside() -> None:
    compiling: list[bool] = []

    def add(x: Any) -> Any:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
        compiling.append(torch.compiler.is_compiling() or callback() is not None)
        return x + 1

    outside = _torch.outside_dynamo(add)
    assert outside(1) == 2 and outside._torchdynamo_disable
    assert sys.modules.get("torch._dynamo") is None or outside(2) == 3

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        return outside(x * 2) * 3

    assert function(torch.ones(2)).tolist() == [9.0, 9.0]
    assert compiling and not any(compiling)


def test_what_is_outside_runs_while_another_thread_imports_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is there then, and empty: of two threads that built their first optimizers, one raised an error."""
    outside = _torch.outside_dynamo(lambda x: x + 1)
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert outside(1) == 2


@probes("skipped_by_dynamo")
def test_what_autograd_calls_is_not_compiled() -> None:
    def inner() -> None:
        compiling.append(torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None)

    @_torch.skipped_by_dynamo
    def hook(grad: Tensor) -> None:
        inner()

    @torch.compile(backend="eager")
    def function(x: Tensor) -> None:
        x.square().sum().backward()

    compiling: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    function(leaf)
    assert compiling == [False] and leaf.grad is not None


@probes("overrides_setattr", "non_persistent_buffers")
def test_modules_tell_what_they_watch_and_leave_out() -> None:
    module = nn.BatchNorm1d(2)
    assert _torch.overrides_setattr(nn.LSTM(2, 2)) and not _torch.overrides_setattr(module)
    module.register_buffer("extra", torch.zeros(1), persistent=False)
    assert _torch.non_persistent_buffers(module) == {"extra"}


@probes("inherited_call")
def test_a_subclass_of_a_traced_module_is_called_as_that_is() -> None:
    assert _torch.inherited_call(nn.Linear) == {}
    traced: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Tanh()))
    inputs, expected = torch.ones(2), torch.ones(2).tanh()
    for own, fails in ((_torch.inherited_call(type(traced)), False), ({}, True)):
        traced.__class__ = type("Own", (type(traced),), own)
        traced.recompile()
        if fails:  # a reason to have it
            with pytest.raises(RecursionError):
                traced(inputs)
        else:
            assert torch.equal(traced(inputs), expected)


@probes("loads_as_torch_does")
def test_modules_that_look_at_what_they_load_are_told_from_others() -> None:
    hooked, own = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(lambda *args: None)
    own.__class__ = type("Own", (nn.Linear,), {"_load_from_state_dict": lambda *args: None})
    kinds = (nn.Linear(2, 2), nn.BatchNorm1d(2), hooked, own)
    assert [_torch.loads_as_torch_does(module) for module in kinds] == [True, True, False, False]


@probes("view_base", "pytree")
def test_views_know_their_base_and_containers_are_taken_apart() -> None:
    base, tree = torch.zeros(4), OrderedDict(a=1, b=2)
    assert _torch.view_base(base[1:]) is base and _torch.view_base(base) is None
    leaves, spec = _torch.pytree.tree_flatten(tree)
    assert (leaves, _torch.pytree.tree_unflatten(leaves, spec)) == ([1, 2], tree)
    assert OrderedDict in _torch.pytree.SUPPORTED_NODES and int not in _torch.pytree.SUPPORTED_NODES


@probes("dispatch_modes", "outside_dynamo_and_modes")
def test_modes_of_a_checkpoint_and_inner_ones_can_be_taken_off_and_put_back() -> None:
    class Hooks:
        outer = 1

        @_torch.outside_dynamo_and_modes(lambda self: self.outer)
        def run(self) -> int:
            torch.ones(1).mul(2)
            return _torch.dispatch_modes()

    outer, inner = Operators(), Operators()
    assert Hooks().run() == 0
    with outer, inner:
        assert Hooks().run() == 1 and _torch.dispatch_modes() == 2
        torch.ones(1)
    assert not any("mul" in name for name in inner.seen) and any("mul" in name for name in outer.seen)
    assert inner.seen[-1:] == ["aten.ones.default"]
    keep, replay = create_selective_checkpoint_contexts(lambda *unused, **options: CheckpointPolicy.MUST_SAVE)
    for context in (keep, replay):
        with outer, context, inner:
            assert _torch.dispatch_modes() == 3 and Hooks().run() == 1


@probes("cached_parametrizations")
def test_weights_that_parametrize_keeps_for_later_calls() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    weight = module.weight
    assert weight is not module.weight and not _torch.cached_parametrizations()
    with nn.utils.parametrize.cached():
        weight = module.weight
        assert any(kept is weight for kept in _torch.cached_parametrizations()) and module.weight is weight
    assert not _torch.cached_parametrizations()
