"""Reductions in flight, and the memory that they keep."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.comm.reductions import Reductions
from fsdp2.comm.streams import Lanes
from tests.support.streams import Device

CPU = torch.device("cpu")


def window(limit: int, nbytes: int = 0) -> Reductions:
    """Return an empty window for so many operations, or for gradients of so many bytes."""
    reductions = Reductions(Lanes(CPU))
    reductions.set_limits(limit, 1)
    reductions.memory.count_unit(nbytes)
    return reductions


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


# ---- operations in flight ----


def test_an_operation_starts_at_once_and_ends_when_asked() -> None:
    """Asking twice, or where there is nothing, is harmless."""
    operations, flying = Operations(), window(2)
    flying.finish()
    flying.add(operations.make(0, 2))
    assert operations.log == [(0, 0)]
    for _ in range(2):
        flying.finish()
        assert operations.log == [(0, 0), (0, 1), (0, 2)] and not operations.alive


def test_one_more_than_the_limit_carries_the_oldest_on() -> None:
    operations, flying = Operations(), window(2)
    for name in range(3):
        flying.add(operations.make(name, 1))
    assert operations.log == [(0, 0), (1, 0), (0, 1), (2, 0)]


def test_a_second_wait_does_not_hold_up_the_first_of_others() -> None:
    operations, flying = Operations(), window(1)
    for name in range(4):
        flying.add(operations.make(name, 2))
    # Operation 0 ends when operation 2 waits for the second time: one more than the limit.
    assert operations.log == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2), (3, 0)]


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12))
def test_operations_end_in_order_within_their_limit(limit: int, waits: list[int]) -> None:
    operations, flying = Operations(), window(limit)
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
    operations, flying = Operations(), window(limit)
    for name in range(count):
        flying.add(operations.make(name, 1))
        assert len(operations.alive) <= limit
    assert len(operations.alive) == min(limit, count)


def test_operations_are_no_more_than_their_bytes_allow() -> None:
    """Gradients of a unit may be in flight: eight chunks of it, or two that are larger. One is, whatever its size."""
    operations, flying = Operations(), window(8, 10)
    for name, nbytes in enumerate((4, 4, 4, 2, 12, 1)):
        flying.add(operations.make(name, 1), nbytes)
        assert operations.alive == [{0}, {0, 1}, {1, 2}, {1, 2, 3}, {4}, {5}][name]


def test_units_on_streams_wait_for_all_but_the_previous_one() -> None:
    """Gradients that are copied beside compute are given back before inputs, but not those of the previous unit."""
    with Device():
        flying = window(1)
        memory, tensors = flying.memory, [torch.ones(1) for _ in range(4)]
        references = [weakref.ref(tensor) for tensor in tensors]
        for _ in range(2):
            memory.count_unit(8)
            memory.retain_inputs(flying.lanes.reduce.event(), [tensors.pop(0)], 3)
            memory.retain_packed(flying.lanes.pack.event(), [tensors.pop(0)], 1)
        memory.expect_unit(1 << 20)
        assert [reference() is None for reference in references] == [True, True, False, False]
        flying.finish()


def test_a_backward_begins_with_the_limit_of_its_own_units() -> None:
    """The largest unit of an earlier one may be the last of this one."""
    operations, flying, owners = Operations(), window(1), cast(Any, ["a", "b", "c"])
    for name, nbytes in enumerate((4, 9, 2)):
        flying.add(operations.make(name, 1), 0, owners[name], nbytes)
    assert flying.memory.limit_bytes == 9
    flying.finish()
    flying.add(operations.make(3, 1), 0, owners[0], 2)
    assert flying.memory.limit_bytes == 2


def test_a_lower_limit_holds_from_the_next_operation_on() -> None:
    operations, flying = Operations(), window(4)
    for name in range(4):
        flying.add(operations.make(name, 1))
    flying.set_limits(1, 1)
    flying.add(operations.make(4, 1))
    assert operations.alive == {4}


def test_an_operation_that_raises_is_dropped_and_the_others_go_on() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise RuntimeError("lost connection")

    operations, flying = Operations(), window(2)
    flying.add(failing())
    flying.add(operations.make(1, 1))
    with pytest.raises(RuntimeError, match="lost connection"):
        flying.finish()
    flying.finish()
    assert operations.log == [(1, 0), (1, 1)]


def test_all_operations_are_abandoned_though_waiting_for_one_raises() -> None:
    """``reset_iter_state()`` raised before it had reset any group, and had to be called twice."""

    def failing(number: int) -> Generator[None, None, None]:
        try:
            yield
        finally:
            raise RuntimeError(f"lost connection {number}")

    operations, flying = Operations(), window(3)
    for operation in (failing(1), operations.make(1, 1), failing(2)):
        flying.add(operation)
    with pytest.raises(RuntimeError, match="lost connection 2"):  # the oldest was waited for first
        flying.abandon([None])
    assert not operations.alive
    flying.abandon([None])


def test_bytes_of_abandoned_operations_are_counted_no_longer() -> None:
    """What comes after would be waited for as if they were still in flight."""
    operations, flying = Operations(), window(9, nbytes=10)
    flying.add(operations.make(0, 2), nbytes=10)
    flying.abandon([None])
    flying.add(operations.make(1, 2), nbytes=5)
    flying.add(operations.make(2, 2), nbytes=5)
    assert operations.alive == {1, 2} and (1, 1) not in operations.log
    flying.abandon([None])


def test_abandoned_operations_go_no_further_and_free_what_they_held() -> None:
    operations, flying = Operations(), window(1)
    inputs = torch.ones(3)
    reference = weakref.ref(inputs)

    def holding(held: torch.Tensor) -> Generator[None, None, None]:
        yield
        held.add_(1)

    flying.add(operations.make(0, 2))
    flying.add(holding(inputs))
    del inputs
    flying.abandon([None])
    assert not operations.alive and reference() is None
    flying.finish()
    assert operations.log == [(0, 0), (0, 1)]


# ---- on streams ----


def test_on_streams_inputs_of_so_many_bytes_are_held() -> None:
    """The operation itself is through at once."""
    with Device():
        flying = window(1, 12)

        def operation(tensor: torch.Tensor) -> Generator[None, None, None]:
            with flying.lanes.reduce.after(flying.lanes.compute) as done:
                tensor + 1
            flying.memory.make_room(tensor.nbytes)
            flying.memory.retain_inputs(done.event, [tensor], tensor.nbytes)
            return
            yield

        for end in (lambda: flying.abandon([]), flying.finish):
            held, alive = [], []
            for numel in (1, 2, 1, 1, 4, 1):
                held.append(weakref.ref(tensor := torch.ones(numel)))
                flying.add(operation(tensor))
                del tensor
                alive.append([j for j, reference in enumerate(held) if reference() is not None])
            assert alive == [[0], [0, 1], [1, 2], [2, 3], [4], [5]]
            end()
            assert not any(reference() is not None for reference in held)


class Counted(int):
    """A number of bytes that counts how often it is added to others."""

    added = 0

    def __radd__(self, other: int) -> int:
        Counted.added += 1
        return int(self) + other


def test_bytes_in_flight_are_added_up_once() -> None:
    """For each chunk, the host added up the bytes of all that was held: more than half of its calls in a step."""
    with Device():
        flying, before = window(1, 1 << 20), Counted.added
        memory, lane = flying.memory, flying.lanes.reduce
        for chunk in range(1, 9):
            memory.make_room(4)
            memory.retain_inputs(lane.event(), [torch.ones(1)], Counted(4))
            assert Counted.added - before == chunk
        flying.finish()


def test_lanes_are_waited_for_after_they_were_used_and_not_later() -> None:
    """Recovery waits for gathers, of which one may have raised. The end of a later backward does not: what is gathered
    then is needed later."""
    with Device() as device:
        flying = window(1)
        gather, reduce = (flying.memory.use(lane) for lane in (flying.lanes.gather, flying.lanes.reduce))
        for wanted in ({gather, reduce}, {reduce}):
            before = dict(device.compute.clocks)
            for lane in (gather, reduce):
                with lane.after():
                    torch.ones(1)
            flying.memory.use(reduce)
            flying.memory.drop_all()
            after, names = device.compute.clocks, {lane: lane._stream.name for lane in (gather, reduce)}
            assert {lane for lane, name in names.items() if after[name] > before.get(name, 0)} == wanted


def test_on_streams_only_what_came_before_the_last_is_waited_for() -> None:
    """The third chunk is packed beside the second's reduction, and summed beside the second's all-reduce; waiting for
    the second as well would leave one of them idle. At the end nothing is held any more."""
    with Device():
        flying, held = window(1), []
        pack, reduce, replicate = (getattr(flying.lanes, name) for name in ("pack", "reduce", "replicate"))

        def operation() -> Generator[None, None, None]:
            with pack.after() as packed:
                rows = torch.ones(2)
            with reduce.after(packed.event) as reduced:
                sums = rows + 1
            flying.memory.retain_encoded(reduced.event, [rows])
            with replicate.after(reduced.event) as done:
                sums.add_(1)
            flying.memory.retain_sums(done.event, sums)
            flying.memory.use(replicate)
            held.extend(weakref.ref(tensor) for tensor in (rows, sums))
            return
            yield

        for _ in range(3):
            flying.add(operation())
        for lane, other in ((pack, reduce), (reduce, replicate)):
            assert lane._stream.clocks[other._stream.name] == other._stream.clocks[other._stream.name] // 3
        flying.finish()
        assert len(held) == 6 and not any(reference() is not None for reference in held)
