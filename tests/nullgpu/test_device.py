"""The null device itself: what its page says of memory, copies, capture and NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.nullgpu.device import Counts
from tests.nullgpu.programs import ranks


def test_memory_is_counted_and_ends():
    """80 GiB of addresses; more is refused, as on a GPU."""
    torch.cuda.empty_cache()
    tensor = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() >= 60 << 30
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    del tensor
    torch.cuda.empty_cache()


def test_small_copies_are_done_and_kernels_are_counted():
    """What goes to the device comes back; what is computed there is not there."""
    host = torch.arange(16.0)
    with Counts() as counts:
        there = host.cuda()
        there + 1
        assert torch.equal(there.cpu(), host)
    assert (counts["memcpys"], counts["kernels"], counts["host_waits"]) == (2, 1, 2)


@pytest.mark.parametrize("what", ["item", "synchronize", "query", "work beside it"])
def test_what_a_capture_forbids(what):
    """The host waits, or a stream works beside the capture."""
    tensor, event, beside = torch.zeros(4, device="cuda"), torch.cuda.Event(), torch.cuda.Stream()
    if beside == torch.cuda.graph.default_capture_stream:  # streams come from a pool, and other tests took some
        beside = torch.cuda.Stream()

    def breaks() -> None:
        if what == "item":
            tensor.sum().item()
        elif what == "synchronize":
            torch.cuda.synchronize()
        elif what == "query":
            event.record()
            event.query()
        else:
            with torch.cuda.stream(beside):
                tensor + 1

    with pytest.raises(RuntimeError):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(1)
            breaks()
    torch.cuda.synchronize()


def test_a_stream_must_be_joined_at_the_end_of_a_capture():
    """With the wait at its end the capture is right, and its graph has both kernels."""
    for joins in (True, False):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # One after the other: torch's streams come from a pool, so a later one may be the stream of captures.
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        tensor = torch.zeros(4, device="cuda")
        error = None
        try:
            with torch.cuda.graph(graph, stream=stream):
                current = torch.cuda.current_stream()
                tensor.add_(1)
                other.wait_stream(current)
                with torch.cuda.stream(other):
                    tensor.add_(1)
                if joins:
                    current.wait_stream(other)
        except RuntimeError as raised:
            error = str(raised)
        assert (error is None) is joins and (joins or "unjoined" in str(error))


def test_one_process_is_a_rank_of_many():
    """A small collective brings what this rank sent, as if every rank had sent it; groups are counted."""
    with ranks(256):
        tensor, gathered = torch.full((4,), 3.0, device="cpu").cuda(), torch.zeros(1024, device="cpu").cuda()
        with Counts() as counts:
            dist.all_gather_into_tensor(gathered, tensor)
        assert gathered.cpu().unique().tolist() == [3.0]
        assert (counts["nccl_calls"], counts["nccl_groups"]) == (1, 1)
