"""The private torch symbols that communication leans on still mean what fsdp2 takes them to mean."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.api import torch_since
from tests.unit.meshes import gloo_mesh
from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import probes


@probes("default_store")
def test_the_store_of_the_default_process_group_is_shared_counts_and_compares() -> None:
    with gloo_mesh():
        store = dist.PrefixStore("probe", _torch.default_store().clone())
        assert store.add("counted", 1) == 1 and store.add("counted", 1) == 2
        assert store.compare_set("first", "", "mine") == b"mine" == store.compare_set("first", "", "theirs")
        assert store.check(["first"]) and not store.check(["never"])
        store.delete_key("first")
        assert not dist.PrefixStore("probe", _torch.default_store()).check(["first"])


@probes("group_timeout")
def test_a_group_knows_how_long_its_collectives_may_take() -> None:
    with gloo_mesh():
        group = dist.new_group([0], timeout=timedelta(seconds=77))
        assert _torch.group_timeout(group, torch.device("cpu")) == timedelta(seconds=77)
        assert _torch.group_timeout(dist.new_group([0]), torch.device("cpu")) == default_pg_timeout


@probes("group_on_store")
def test_a_group_needs_no_default_group() -> None:
    group = _torch.group_on_store(dist.HashStore(), "own", 0, 1, "gloo", timedelta(seconds=77))
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [1.0] * 3 and dist.get_process_group_ranks(group) == [0] and not dist.is_initialized()
    assert _torch.group_timeout(group, torch.device("cpu")) == timedelta(seconds=77)


@probes("launched_collectives")
def test_collectives_of_all_groups_are_counted() -> None:
    with gloo_mesh():
        counts = [_torch.launched_collectives()]
        for launch in (dist.barrier, lambda: dist.all_reduce(torch.ones(2), group=dist.new_group([0]))):
            launch()
            counts.append(_torch.launched_collectives())
        assert counts[0] < counts[1] < counts[2], counts


@probes("named_group")
def test_a_group_is_made_under_a_name() -> None:
    with gloo_mesh():
        group, value = _torch.named_group([0], "mine"), torch.ones(2)
        dist.all_reduce(value, group=group)
        assert group.group_name == "mine" and dist.get_process_group_ranks(group) == [0]
        assert _torch.group_timeout(group, torch.device("cpu")) == default_pg_timeout


@probes("AsyncCollectiveTensor")
def test_a_gradient_may_still_be_travelling() -> None:
    with gloo_mesh() as mesh:
        pending = all_reduce(torch.ones(2), "sum", mesh)
        assert isinstance(pending, _torch.AsyncCollectiveTensor)
        waited = pending.wait()
        assert type(waited) is Tensor and waited.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("async_op", [False, True])
@probes("AllgatherOptions", "AllreduceOptions", "ReduceScatterOptions", "AllToAllOptions")
@probes("group_all_gather", "group_all_reduce", "group_reduce_scatter", "group_all_to_all")
def test_a_groups_own_collectives_fill_their_first_tensor(async_op: bool) -> None:
    def options(kind: Any, op: Any = None) -> Any:
        made = kind()
        made.asyncOp = async_op
        if op is not None:
            made.reduceOp = op
        return made

    with gloo_mesh() as mesh:
        group, sent = mesh.get_group(), torch.arange(4.0)
        outputs = [torch.zeros(4) for _ in range(3)] + [sent.clone()]
        works = [
            _torch.group_all_gather(group)(outputs[0], sent, options(_torch.AllgatherOptions)),
            _torch.group_reduce_scatter(group)(
                outputs[1], sent, options(_torch.ReduceScatterOptions, dist.ReduceOp.AVG)
            ),
            _torch.group_all_to_all(group)(outputs[2], sent, [], [], options(_torch.AllToAllOptions)),
            _torch.group_all_reduce(group)([outputs[3]], options(_torch.AllreduceOptions, dist.ReduceOp.SUM)),
        ]
        for work in works:
            work.wait()
    assert all(torch.equal(output, sent) for output in outputs)


@probes("group_all_gather_coalesced", "group_reduce_scatter_coalesced")
def test_several_gathers_or_reductions_can_be_one_call() -> None:
    for method, options in (
        (_torch.group_all_gather_coalesced, _torch.AllgatherOptions()),
        (_torch.group_reduce_scatter_coalesced, _torch.ReduceScatterOptions()),
    ):
        outputs, inputs = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
        with gloo_mesh() as mesh:
            method(mesh.get_group())(outputs, inputs, options).wait()
        assert all(torch.equal(a, b) for a, b in zip(outputs, inputs))


@probes("AllGather", "ReduceScatter")
def test_custom_collectives_are_called_as_we_call_them() -> None:
    first = ["self", "output_tensor", "input_tensor", "group"]
    for interface, others in ((_torch.AllGather, ["async_op"]), (_torch.ReduceScatter, ["op", "async_op"])):
        assert list(inspect.signature(interface.__call__).parameters) == [*first, *others]
        assert list(inspect.signature(interface.allocate).parameters)[1:] == ["size", "dtype", "device"]
        assert interface.__abstractmethods__ == {"__call__", "allocate"}


@probes("TORCH_COMMS", "ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter")
def test_torchs_collectives_with_memory_of_the_group_do_as_others() -> None:
    with gloo_mesh() as mesh:
        group, cpu = mesh.get_group(), torch.device("cpu")
        gather, scatter = _torch.ProcessGroupAllocAllGather(group), _torch.ProcessGroupAllocReduceScatter(group)
        assert isinstance(gather, _torch.AllGather) and isinstance(scatter, _torch.ReduceScatter)
        assert type(gather) in _torch.TORCH_COMMS and type(scatter) in _torch.TORCH_COMMS
        outputs = [comm.allocate((3,), dtype=torch.float32, device=cpu) for comm in (gather, scatter)]
        gather(output_tensor=outputs[0], input_tensor=torch.ones(3), group=group, async_op=True).wait()
        op = dist.ReduceOp.AVG
        scatter(output_tensor=outputs[1], input_tensor=torch.ones(3), group=group, op=op, async_op=True).wait()
    assert [output.tolist() for output in outputs] == [[1.0] * 3] * 2


@probes("SymmMemAllGather", "SymmMemReduceScatter")
def test_torchs_collectives_with_symmetric_memory_are_made_of_group_and_backend() -> None:
    if not torch_since("2.12"):
        assert _torch.SymmMemAllGather is None is _torch.SymmMemReduceScatter
        return
    kinds = {_torch.SymmMemAllGather: _torch.AllGather, _torch.SymmMemReduceScatter: _torch.ReduceScatter}
    for kind, interface in kinds.items():
        assert issubclass(kind, interface) and kind in _torch.TORCH_COMMS and not kind.__abstractmethods__
        assert list(inspect.signature(kind.__init__).parameters)[1:] == ["group", "backend"]


@probes("without_modes")
def test_modes_do_not_see_what_is_outside_of_them() -> None:
    with gloo_mesh() as mesh, CommDebugMode() as mode:
        options = _torch.AllreduceOptions()
        with _torch.without_modes():
            _torch.group_all_reduce(mesh.get_group())([torch.ones(2)], options)
        assert mode.get_total_counts() == 0
        _torch.group_all_reduce(mesh.get_group())([torch.ones(2)], options)
        assert mode.get_total_counts() == 1


@probes("async_saves")
def test_the_group_of_a_save_in_the_background_can_be_found(tmp_path: Path) -> None:
    begun, goes_on = Event(), Event()

    class Waiting(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            begun.set()
            goes_on.wait()
            return super().write_data(plan, planner)

    with gloo_mesh():
        group = dist.new_group(backend="gloo")
        for given in (None, group):
            saving = dcp.async_save({"a": torch.ones(2)}, storage_writer=Waiting(tmp_path), process_group=given)
            assert [save["process_group"] for save in _torch.async_saves()] == [given]  # even if it has not begun yet
            begun.wait()
            assert [save["process_group"] for save in _torch.async_saves()] == [given]
            goes_on.set()
            saving.result()
            assert _torch.async_saves() == []
            goes_on.clear()
