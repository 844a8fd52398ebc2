"""Which collective is called and with what; that they move the right bytes is for tests with several processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fsdp2.comm import collectives
from fsdp2.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    all_to_all,
    broadcast,
    chunks_in_flight,
    exchange_objects,
    needs_one_buffer,
    prefers_all_to_all,
    reduce_scatter,
    share_bytes,
    wire_view,
)
from fsdp2.sharding.mesh import Axis
from tests.support.fake import fake_mesh

ALONE = Axis(None, 1, 0, "none")
CARRIED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int16, torch.uint8, torch.complex64)


class Custom:
    """A collective of the user's own that notes its calls."""

    def __init__(self, *works: Any) -> None:
        self.works = list(works)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **kwargs: Any) -> Any:
        """Note the call."""
        self.calls.append(kwargs)
        return self.works.pop(0)


# ---- one rank ----


@pytest.mark.parametrize("custom", [None, Custom()])  # which is not needed
def test_one_rank_gathers_by_copying(custom: Any) -> None:
    outputs, inputs = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    assert all_gather(outputs, inputs, ALONE, async_op=True, custom=custom) == []
    assert all(torch.equal(a, b) for a, b in zip(outputs, inputs))


@pytest.mark.parametrize("average", [False, True])
def test_one_rank_reduces_to_itself(average: bool) -> None:
    output, rows = torch.zeros(3, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)
    assert reduce_scatter(output, rows, ALONE, average=average, async_op=True) == []
    assert output.tolist() == [1.0] * 3
    assert all_reduce(output, ALONE, average=average, async_op=True) == []
    assert output.tolist() == [1.0] * 3


def test_one_rank_tells_itself() -> None:
    tensor = torch.ones(3)
    broadcast(tensor, ALONE)
    assert tensor.tolist() == [1.0] * 3
    assert share_bytes(b"mine", ALONE, 0, tensor.device) == b"mine"
    assert exchange_objects("mine", ALONE, tensor.device) == ["mine"]


# ---- bytes ----


def test_bytes_are_shared_by_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """First how many, then what they are; other ranks take them."""
    sent: list[Tensor] = []
    monkeypatch.setattr(collectives, "broadcast", lambda tensor, axis, source: sent.append(tensor.clone()))
    device = torch.device("cpu")
    assert share_bytes(b"text", Axis(None, 2, 1, "gloo"), 1, device) == b"text"
    assert [tensor.tolist() for tensor in sent] == [[4], list(b"text")]


@pytest.mark.parametrize("length", [0, 1, 16, 17, 40])
def test_bytes_are_gathered_in_rows_of_whole_sixteens(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """NCCL is slow on other sizes; a row must have room for all that the longest has."""
    sizes: list[int] = []

    def both_send_this(outputs: list[Tensor], inputs: list[Tensor], axis: Axis, *, async_op: bool) -> None:
        sizes.append(inputs[0].nbytes)
        outputs[0].copy_(inputs[0].repeat(2))

    monkeypatch.setattr(collectives, "all_gather", both_send_this)
    data = bytes(range(length))
    assert collectives.gather_bytes(data, Axis(None, 2, 0, "gloo"), torch.device("cpu")) == [data, data]
    assert not any(size % 16 for size in sizes) and length <= sizes[-1] < length + 17


# ---- what travels ----


@pytest.mark.parametrize("dtype", CARRIED)
def test_what_backends_carry_travels_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    assert wire_view(tensor) is tensor


@pytest.mark.parametrize("dtype", AS_BYTES)
def test_other_dtypes_travel_as_bytes(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    view = wire_view(tensor)
    assert view.dtype is torch.uint8 and view.numel() == tensor.nbytes and view.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("backend", "preferred"), [("gloo", [False, True]), ("nccl", [False] * 2), ("none", [False] * 2)]
)
def test_gloo_alone_exchanges_large_rows(backend: str, preferred: list[bool]) -> None:
    sizes = (1 << 10, 1 << 20)
    assert [prefers_all_to_all(replace(ALONE, size=2, backend=backend), nbytes) for nbytes in sizes] == preferred
    assert not any(prefers_all_to_all(replace(ALONE, backend=backend), nbytes) for nbytes in sizes)


def test_streams_need_one_chunk_in_flight_and_gloo_more() -> None:
    assert chunks_in_flight(replace(ALONE, backend="nccl")) == 1
    assert chunks_in_flight(replace(ALONE, backend="gloo")) == 4


# ---- several ranks ----


@pytest.mark.parametrize(("async_op", "works"), [(True, 2), (False, 0)])
def test_every_large_parameter_is_a_collective_of_its_own(async_op: bool, works: int) -> None:
    with fake_mesh(2) as mesh:
        outputs, inputs = [torch.zeros(4), torch.zeros(8)], [torch.ones(2), torch.ones(4)]
        assert len(all_gather(outputs, inputs, Axis.of(mesh, 0), async_op=async_op)) == works


@pytest.mark.parametrize(
    ("backend", "ranks", "nbytes", "swaps"),
    [("gloo", 2, 1 << 20, 1), ("gloo", 2, 1 << 10, 0), ("gloo", 4, 1 << 20, 0), ("nccl", 2, 1 << 20, 0)],
)
def test_two_ranks_on_gloo_swap_large_pieces(backend: str, ranks: int, nbytes: int, swaps: int) -> None:
    axis = Axis("group", ranks, 1, backend)
    output, piece = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes // ranks, dtype=torch.uint8)
    with (
        mock.patch.object(collectives, "group_all_to_all") as swap,
        mock.patch.object(collectives, "group_all_gather") as gather,
    ):
        assert len(all_gather([output], [piece], axis, async_op=True)) == 1
    assert (swap.call_count, gather.call_count) == (swaps, 1 - swaps)
    if swaps:
        assert output.view(2, -1).sum(1).tolist() == [0, nbytes // 2]  # its own piece is there at once
        half, sent, received_sizes, sent_sizes, _ = swap.return_value.call_args.args
        assert (half.data_ptr(), sent.data_ptr()) == (output.data_ptr(), output.view(2, -1)[1].data_ptr())
        assert received_sizes == sent_sizes == [nbytes // 2, 0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_write_after_the_start_of_a_gather_is_not_sent(ranks: int) -> None:
    """A thread sends. What it found in the shards, and so what each rank had, depended on how fast it was."""
    axis, output, piece = Axis("group", ranks, 1, "gloo"), torch.zeros(2 * ranks), torch.ones(2)
    with mock.patch.object(collectives, "group_all_gather") as gather:
        all_gather([output], [piece], axis, async_op=True)
    piece.fill_(5)
    _, sent, _ = gather.return_value.call_args.args
    assert sent.tolist() == output.view(ranks, -1)[1].tolist() == [1, 1]


@pytest.mark.parametrize(("count", "calls"), [(1, 0), (3, 1)])
def test_nccl_gathers_several_in_one_launch(count: int, calls: int) -> None:
    with fake_mesh(2) as mesh:
        axis = replace(Axis.of(mesh, 0), backend="nccl")
        with mock.patch.object(collectives, "group_all_gather_coalesced") as coalesced:
            all_gather([torch.zeros(4)] * count, [torch.ones(2)] * count, axis, async_op=False)
        assert coalesced.call_count == calls


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("average", "op"), [(False, dist.ReduceOp.SUM), (True, dist.ReduceOp.AVG)])
def test_a_mean_is_the_backends(async_op: bool, average: bool, op: Any) -> None:
    """That of complex numbers too, which it gets as twice as many real ones."""
    axis, two, four = Axis("group", 2, 0, "nccl"), *(torch.zeros(n, dtype=torch.complex64) for n in (2, 4))
    with (
        mock.patch.object(collectives, "group_reduce_scatter") as scatter,
        mock.patch.object(collectives, "group_all_reduce") as reduce,
    ):
        works = reduce_scatter(two, four, axis, average=average, async_op=async_op)
        works += all_reduce(two, axis, average=average, async_op=async_op)
    for call in (scatter, reduce):
        *tensors, options = call.return_value.call_args.args
        assert [t.shape.numel() for t in pytree.tree_leaves(tensors)] == ([4, 8] if call is scatter else [4])
        assert call.call_args.args[0] == "group" and options.reduceOp == op and options.asyncOp == async_op
        assert call.return_value.return_value.wait.called == (not async_op)  # synchronous: waited for here
    started = [call.return_value.return_value for call in (scatter, reduce)]
    assert works == (started if async_op else [])


def test_an_exchange_is_one_work() -> None:
    with fake_mesh(2) as mesh:
        axis = Axis.of(mesh, 0)
        assert len(all_to_all(torch.zeros(4), torch.ones(4), axis, async_op=True)) == 1
        assert all_to_all(torch.zeros(4), torch.ones(4), axis, async_op=False) == []


def test_without_data_everybody_says_the_same() -> None:
    with fake_mesh(2) as mesh:
        axis = Axis.of(mesh, 0)
        broadcast(torch.ones(2, dtype=torch.bool), axis)
        assert share_bytes(b"mine", axis, 0, torch.device("cpu")) == b"mine"
        assert exchange_objects("mine", axis, torch.device("cpu")) == ["mine"] * 2


def test_a_broadcast_comes_from_the_first_rank_of_the_axis_as_bytes_if_need_be() -> None:
    axis, tensor = Axis("group", 2, 1, "gloo"), torch.ones(2, dtype=torch.bool)
    with mock.patch.object(collectives.dist, "broadcast") as sent:
        broadcast(tensor, axis)
    ((wire,), options) = sent.call_args
    assert wire.dtype is torch.uint8 and wire.data_ptr() == tensor.data_ptr()
    assert options == {"group": "group", "group_src": 0}


# ---- the user's own ----


def test_a_custom_gather_is_called_as_torch_calls_it() -> None:
    axis, work = Axis("group", 2, 0, "gloo"), object()
    custom, outputs, inputs = Custom(work, None), [torch.zeros(4)] * 2, [torch.ones(2)] * 2
    assert all_gather(outputs, inputs, axis, async_op=True, custom=custom) == [work]
    for call, output, sent in zip(custom.calls, outputs, inputs):
        assert call == {"output_tensor": output, "input_tensor": sent, "group": "group", "async_op": True}


@pytest.mark.parametrize("work", [None, "work"])
def test_a_custom_reduce_scatter_is_called_as_torch_calls_it(work: Any) -> None:
    custom, output, rows = Custom(work), torch.zeros(2), torch.ones(4)
    axis = Axis("group", 2, 0, "gloo")
    works = reduce_scatter(output, rows, axis, average=True, async_op=False, custom=custom)
    assert works == ([] if work is None else [work]) and not needs_one_buffer(custom)
    options = {"group": "group", "op": dist.ReduceOp.AVG, "async_op": False}
    assert custom.calls == [{"output_tensor": output, "input_tensor": rows, **options}]


class GroupInPython(dist.ProcessGroup):
    """A process group of two ranks written in Python, as fault-tolerant and threaded ones are; it notes its calls."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        """Note collectives, find the rest."""
        if name.startswith(("all", "reduce", "_all", "_reduce")):
            self.calls.append(name)
            return lambda *args: None
        return super().__getattribute__(name)


def test_a_group_written_in_python_is_asked_itself() -> None:
    group = GroupInPython()
    axis, two, four = Axis(group, 2, 0, "mine"), torch.zeros(2), torch.zeros(4)
    all_gather([four], [two], axis, async_op=True)
    all_gather([four, four], [two, two], replace(axis, backend="nccl"), async_op=True)
    reduce_scatter(two, four, axis, average=False, async_op=True)
    all_to_all(four, four, axis, async_op=True)
    all_reduce(two, axis, average=True, async_op=True)
    all_reduce_max(two, axis)
    assert len(group.calls) == 6
