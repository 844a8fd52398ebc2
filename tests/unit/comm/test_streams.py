"""Lanes, values in flight and the bounded set of operations, on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Generator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.comm.streams import ComputeLane, Lane, Lanes, Retained
from tests.support.streams import Device

CPU = torch.device("cpu")


def retained(limit: int) -> Retained:
    """Return an empty set of operations on a CPU."""
    return Retained(Lanes(CPU), limit)


class Operations:
    """Makes operations that log their steps as (name, step), and counts those in flight."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []
        self.alive: set[int] = set()
        self.most = 0

    def make(self, name: int, waits: int) -> Generator[None, None, None]:
        """Return an operation that waits so many times."""
        self.alive.add(name)
        self.most = max(self.most, len(self.alive))
        try:
            for step in range(waits):
                self.log.append((name, step))
                yield
            self.log.append((name, waits))
        finally:
            self.alive.discard(name)


# ---- lanes ----


def test_a_cpu_lane_is_program_order() -> None:
    lane = Lane(CPU, priority=-1)
    log = []
    with lane.after(None) as done:
        log.append("inside")
    log.append("behind")
    assert log == ["inside", "behind"]
    assert done.event is None
    assert lane.async_op


def test_cpu_lanes_nest() -> None:
    lanes = Lanes(CPU)
    with lanes.gather.after(lanes.compute) as outer, lanes.reduce.after(outer.event) as inner:
        pass
    assert outer.event is None and inner.event is None


def test_an_error_leaves_a_cpu_lane_usable() -> None:
    lane = Lane(CPU)
    with pytest.raises(KeyError), lane.after():
        raise KeyError("inside")
    with lane.after() as done:
        assert done.event is None


def test_a_cpu_lane_ignores_a_given_stream() -> None:
    assert Lane(CPU, stream=object()).async_op


def test_the_compute_lane_of_a_cpu_has_no_events() -> None:
    compute = ComputeLane(CPU)
    assert compute.event() is None
    assert compute.wait(None) is None


# ---- streams ----


def test_lanes_are_made_when_they_are_used() -> None:
    """Each state has lanes until a root takes it in; a device has thirty-two streams, shared by whoever asks."""
    with Device() as device:
        lanes = Lanes(CPU)
        retained(1), lanes.compute.wait(lanes.compute.event())
        assert device.streams == [device.compute]
        with lanes.gather.after(), lanes.gather.after():
            pass
        assert len(device.streams) == 2


def test_lanes_are_made_on_the_device_of_the_mesh() -> None:
    """Another device may be the current one when a lane is first used; the lane's stream was made there."""
    second = torch.device("cuda", 1)
    with Device() as device:
        lanes = Lanes(second)
        with lanes.gather.after(lanes.compute):
            pass
        lanes.compute.enter_backward()
    assert device.asked_for == {second}


def test_in_a_backward_compute_is_the_stream_that_it_entered_on() -> None:
    """The hooks of gradients may run on the stream of an earlier iteration: what they put there is waited for too."""
    with Device() as device:
        compute, stale, later = Lanes(CPU).compute, device.Stream(), device.Stream()
        compute.enter_backward()
        with device.stream(stale):
            torch.zeros(3)
            event = compute.event()
            assert event is not None and stale.name in event.clocks  # type: ignore[attr-defined]
            with device.stream(later):
                torch.zeros(3)
                done = later.record_event()
            compute.wait(done)  # type: ignore[arg-type]
        for stream in (device.compute, stale):
            assert later.name in stream.clocks and stale.name in stream.clocks
        compute.leave_backward()
        with device.stream(stale):
            torch.zeros(3)
            compute.event()
        assert device.compute.clocks[stale.name] < stale.clocks[stale.name]


def test_on_streams_inputs_of_so_many_bytes_are_held() -> None:
    """The operation itself is through at once."""
    with Device():
        flying = retained(1)
        flying.limit_bytes = 12
        inputs = [torch.ones(numel) for numel in (1, 2, 1, 1, 4, 1)]
        held = [weakref.ref(tensor) for tensor in inputs]

        def operation(tensor: torch.Tensor) -> Generator[None, None, None]:
            with flying.lanes.reduce.after(flying.lanes.compute) as done:
                tensor + 1
            flying.make_room(tensor.nbytes)
            flying.retain(done.event, [tensor], tensor.nbytes)
            return
            yield

        alive = []
        for i in range(6):
            flying.add(operation(inputs.pop(0)))
            alive.append([j for j, reference in enumerate(held[: i + 1]) if reference() is not None])
        assert alive == [[0], [0, 1], [1, 2], [2, 3], [4], [5]]
        flying.finish()
        assert not any(reference() for reference in held)


def test_on_streams_only_what_came_before_the_last_is_waited_for() -> None:
    """The third chunk is packed beside the second's reduction, and summed beside the second's all-reduce; waiting for
    the second as well would leave one of them idle. At the end nothing is held any more."""
    with Device():
        flying, held = retained(1), []
        pack, reduce, replicate = (getattr(flying.lanes, name) for name in ("pack", "reduce", "replicate"))

        def operation() -> Generator[None, None, None]:
            with pack.after() as packed:
                rows = torch.ones(2)
            with reduce.after(packed.event) as reduced:
                sums = rows + 1
            flying.retain_rows(reduced.event, [rows])
            with replicate.after(reduced.event) as done:
                sums.add_(1)
            flying.retain_sums(done.event, sums)
            flying.use(replicate)
            held.extend(weakref.ref(tensor) for tensor in (rows, sums))
            return
            yield

        for _ in range(3):
            flying.add(operation())
        for lane, other in ((pack, reduce), (reduce, replicate)):
            assert lane._stream.clocks[other._stream.name] == other._stream.clocks[other._stream.name] // 3
        flying.finish()
        assert len(held) == 6 and not any(reference() is not None for reference in held)


# ---- operations in flight ----


def test_an_operation_starts_at_once_and_ends_when_asked() -> None:
    operations, flying = Operations(), retained(2)
    flying.add(operations.make(0, 1))
    assert operations.log == [(0, 0)]
    flying.finish()
    assert operations.log == [(0, 0), (0, 1)]
    assert not operations.alive


def test_one_more_than_the_limit_carries_the_oldest_on() -> None:
    operations, flying = Operations(), retained(2)
    for name in range(3):
        flying.add(operations.make(name, 1))
    assert operations.log == [(0, 0), (1, 0), (0, 1), (2, 0)]


def test_a_second_wait_does_not_hold_up_the_first_of_others() -> None:
    operations, flying = Operations(), retained(1)
    for name in range(4):
        flying.add(operations.make(name, 2))
    # Operation 0 ends when operation 2 waits for the second time: one more than the limit.
    assert operations.log == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2), (3, 0)]


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12))
def test_operations_end_in_order_within_their_limit(limit: int, waits: list[int]) -> None:
    operations, flying = Operations(), retained(limit)
    for name, count in enumerate(waits):
        flying.add(operations.make(name, count))
        assert len(operations.alive) <= 2 * limit  # as many again between their first wait and their last
    flying.finish()
    assert not operations.alive
    assert sorted(operations.log) == [(n, step) for n, count in enumerate(waits) for step in range(count + 1)]
    for count in set(waits):
        ends = [n for n, step in operations.log if waits[n] == count and step == count]
        assert ends == sorted(ends)


@given(st.integers(1, 4), st.integers(0, 12))
def test_operations_with_one_wait_are_never_more_than_the_limit(limit: int, count: int) -> None:
    operations, flying = Operations(), retained(limit)
    for name in range(count):
        flying.add(operations.make(name, 1))
        assert len(operations.alive) <= limit
    assert len(operations.alive) == min(limit, count)


def test_operations_are_no_more_than_their_bytes_allow() -> None:
    """Gradients of a unit may be in flight: eight chunks of it, or two that are larger. One is, whatever its size."""
    operations, flying = Operations(), retained(8)
    flying.limit_bytes = 10
    for name, nbytes in enumerate((4, 4, 4, 2, 12, 1)):
        flying.add(operations.make(name, 1), nbytes)
        assert operations.alive == [{0}, {0, 1}, {1, 2}, {1, 2, 3}, {4}, {5}][name]


def test_a_lower_limit_holds_from_the_next_operation_on() -> None:
    operations, flying = Operations(), retained(4)
    for name in range(4):
        flying.add(operations.make(name, 1))
    flying.limit = 1
    flying.add(operations.make(4, 1))
    assert operations.alive == {4}


def test_finishing_twice_or_nothing_is_harmless() -> None:
    operations, flying = Operations(), retained(2)
    flying.finish()
    flying.add(operations.make(0, 2))
    flying.finish()
    flying.finish()
    assert operations.log == [(0, 0), (0, 1), (0, 2)]


def test_an_operation_that_raises_is_dropped_and_the_others_go_on() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise RuntimeError("lost connection")

    operations, flying = Operations(), retained(2)
    flying.add(failing())
    flying.add(operations.make(1, 1))
    with pytest.raises(RuntimeError, match="lost connection"):
        flying.finish()
    flying.finish()
    assert operations.log == [(1, 0), (1, 1)]


def test_all_operations_are_abandoned_though_waiting_for_one_raises() -> None:
    """``reset_iter_state()`` raised before it had reset any group, and had to be called twice."""

    def failing() -> Generator[None, None, None]:
        try:
            yield
        finally:
            raise RuntimeError("lost connection")

    operations, flying = Operations(), retained(2)
    flying.add(failing())
    flying.add(operations.make(1, 1))
    with pytest.raises(RuntimeError, match="lost connection"):
        flying.abandon()
    assert not operations.alive
    flying.abandon()


def test_abandoned_operations_go_no_further_and_free_what_they_held() -> None:
    operations, flying = Operations(), retained(1)
    inputs = torch.ones(3)
    reference = weakref.ref(inputs)

    def holding(held: torch.Tensor) -> Generator[None, None, None]:
        yield
        held.add_(1)

    flying.add(operations.make(0, 2))
    flying.add(holding(inputs))
    del inputs
    flying.abandon()
    assert not operations.alive and reference() is None
    flying.finish()
    assert operations.log == [(0, 0), (0, 1)]
