"""The instruments themselves: whose pool memory comes from, on programs whose answer is known by hand."""

from __future__ import annotations

import torch

from fsdp2.forecasting.clock import Clock
from fsdp2.forecasting.memory import Memory
from fsdp2.forecasting.rank import simulated_rank

KIB = 1 << 10


def made(kib: int) -> torch.Tensor:
    """Return a tensor of so many KiB."""
    return torch.empty(kib * KIB, dtype=torch.uint8)


def program() -> Memory:
    """Use 3 KiB of compute's memory, then 5 of a side stream, then 2 of compute's again, and 1 that is there before."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock), memory:
        there = made(1)
        side = clock.Stream()
        memory.begin()
        first = made(3)
        del first
        with clock.stream(side):
            second = made(5)
        del second
        third = made(2)
        del third, there
    return memory


def test_what_is_reserved_is_the_sum_of_the_peaks_of_streams():
    """A stream cannot have what another one gave back, so more is taken than is ever alive at once."""
    memory = program()
    assert memory.peak().nbytes == 6 * KIB
    assert memory.pools == {"compute": 4 * KIB, "stream 1": 5 * KIB}
    assert memory.reserved == 9 * KIB


def test_a_storage_that_gets_memory_again_is_of_the_stream_that_gives_it():
    """An unsharded parameter is emptied and filled again: it belongs to the stream that is current at the filling."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock), memory:
        memory.begin()
        tensor = made(4)
        tensor.untyped_storage().resize_(0)
        with clock.stream(clock.Stream()):
            tensor.untyped_storage().resize_(4 * KIB)
        assert memory.peak().nbytes == 4 * KIB
        assert memory.pools == {"compute": 4 * KIB, "stream 1": 4 * KIB}
        memory.begin()
        assert memory.pools == {"stream 1": 4 * KIB}  # what is alive counts, what was given back before does not


def test_pools_without_streams_are_one():
    """With gloo everything is of the one pool of the host."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock, backend="gloo"), memory:
        memory.begin()
        made(4)
        tensor = made(2)
        assert memory.pools == {"compute": 4 * KIB} and memory.reserved == memory.peak().nbytes
        del tensor
