"""What agreement costs the process group's store: operations per rank and pass; and no key is left."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp2.engine.agreement import Answer
from fsdp2.engine.collective import END, Collective, PassKind
from fsdp2.ranks import board
from fsdp2.ranks.board import Board
from fsdp2.ranks.monitor import RankMonitor
from fsdp2.ranks.start import compare
from fsdp2.ranks.store import Connections, Keys


class Memory:
    """The keys of a store that all simulated ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.events: dict[str, threading.Event] = {}


class CountingStore:
    """One rank's view of it, which counts operations and the bytes of keys and values."""

    timeout = timedelta(seconds=300)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.operations: Counter[str] = Counter()
        self.sent = 0
        self.seconds = 30.0

    def clone(self) -> CountingStore:
        """Each simulated rank has one already."""
        return self

    def set_timeout(self, limit: timedelta) -> None:
        self.seconds = 30.0  # a simulated rank is slow where thousands share a processor

    def _count(self, name: str, *values: object) -> None:
        self.operations[name] += 1
        self.sent += sum(len(str(value)) for value in values)

    def _put(self, key: str, value: bytes) -> None:
        self.memory.values[key] = value
        event = self.memory.events.pop(key, None)
        if event is not None:
            event.set()

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, amount)
        with self.memory.lock:
            total = int(self.memory.values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def set(self, key: str, value: str) -> None:
        self._count("set", key, value)
        with self.memory.lock:
            self._put(key, value.encode())

    def get(self, key: str, seconds: float | None = None) -> bytes:
        self._count("get", key)
        with self.memory.lock:
            if key in self.memory.values:
                return self.memory.values[key]
            event = self.memory.events.setdefault(key, threading.Event())
        if not event.wait(self.seconds if seconds is None else seconds):
            raise dist.DistStoreError("wait timeout")
        with self.memory.lock:
            return self.memory.values[key]

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        with self.memory.lock:
            return all(key in self.memory.values for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._count("compare_set", key, expected, wanted)
        with self.memory.lock:
            got = self.memory.values.get(key, b"" if not expected else expected.encode())
            if got == expected.encode() and (key in self.memory.values or not expected):
                self._put(key, wanted.encode())
                return wanted.encode()
            return got

    def delete_key(self, key: str) -> bool:
        self._count("delete", key)
        with self.memory.lock:
            return self.memory.values.pop(key, None) is not None


class Group:
    """A group of five parameters, as far as errors name them."""

    residency = SimpleNamespace(needs_gather=True)
    params = [SimpleNamespace(name=f"p{i}", requires_grad=True) for i in range(5)]

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.mesh = SimpleNamespace(shard=SimpleNamespace(size=2), mesh=SimpleNamespace(mesh=torch.tensor(ranks)))
        options = SimpleNamespace(reduce_unused=False, reduce_gradients=True)
        self.store = SimpleNamespace(options=options, extensions=None, formats_digest=())


class Model:
    """A root of so many groups, and one rank's monitor of it."""

    def __init__(self, board: Board, units: int) -> None:
        self.groups: list[Any] = [Group(str(i), board.ranks) for i in range(units)]
        self.all_states = [SimpleNamespace(groups=[group]) for group in self.groups]
        self.monitor = RankMonitor(board, self, lambda job: job())

    def iterate(self, *, skip: int = -1) -> None:
        """One forward and backward; the unit ``skip`` is left out."""
        used = [group for i, group in enumerate(self.groups) if i != skip]
        self.run("forward", [Collective("gather", group) for group in used])
        part = [Collective("reduce", group, (i,)) for group in reversed(used) for i in range(5)]
        self.run("backward", [*(Collective("gather", group) for group in reversed(used)), *part])

    def run(self, kind: str, steps: list[Collective]) -> None:
        """One pass."""
        marked = self.groups[0].store.options.reduce_unused
        self.monitor.begin(PassKind(kind), agrees=marked)
        for step in (*steps, END):  # no unit is for some ranks alone
            if marked:
                answer = self.monitor.agreement.next(step, optional=False, can_join=lambda other, planned: False)
                assert answer is Answer.LAUNCH
            else:
                self.monitor.before(step)
        self.monitor.end()


def board_on(store: Any, rank: int, ranks: int) -> Board:
    """The board of one simulated rank."""
    return Board(Keys(Connections(store), "job", "1"), rank, tuple(range(ranks)))


def on_threads(ranks: int, stores: list[Any], program: Any, units: int = 4) -> None:
    """Run ``program(model, rank, phase)`` on threads that stand for ranks; raise what one of them raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            program(Model(board_on(stores[rank], rank, ranks), units), rank)
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(256 << 10)
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("ranks", "units"), [(8, 4), (8, 80), (512, 4), pytest.param(4096, 2, marks=pytest.mark.slow)])
def test_an_iteration_costs_a_rank_the_same_whatever_the_ranks_and_units(ranks: int, units: int) -> None:
    memory = Memory()
    stores = [CountingStore(memory) for _ in range(ranks)]
    costs: list[list[int]] = [[] for _ in range(ranks)]

    def program(model: Model, rank: int) -> None:
        for _ in range(5):
            model.iterate()
            costs[rank].append(stores[rank].operations.total())

    on_threads(ranks, stores, program, units)
    assert max(cost[0] for cost in costs) <= 17  # and the meeting of the first forward: at most 3 more
    assert all(cost[2] == cost[4] for cost in costs), costs[0]  # the third iteration begins as the second ended
    assert max(store.sent for store in stores) < 2000 + 200 * units
    assert not memory.values


def test_leaving_the_known_way_costs_two_meetings() -> None:
    memory = Memory()
    stores = [CountingStore(memory) for _ in range(64)]
    costs: list[int] = [0] * 64

    def program(model: Model, rank: int) -> None:
        for _ in range(3):
            model.iterate()
        before = stores[rank].operations.total()
        model.iterate(skip=1)
        costs[rank] = stores[rank].operations.total() - before
        for _ in range(2):
            model.iterate()
            model.iterate(skip=1)

    on_threads(64, stores, program)
    assert 0 < max(costs) <= 4 * 4
    assert not memory.values


def test_one_that_differs_is_named_on_all() -> None:
    memory = Memory()
    stores = [CountingStore(memory) for _ in range(8)]
    texts: list[str] = []

    def program(model: Model, rank: int) -> None:
        model.iterate()
        try:
            model.run("forward", [Collective("gather", group) for group in model.groups[: 3 if rank == 5 else 4]])
            model.run("forward", [Collective("gather", model.groups[0])])  # a backward was expected
        except RuntimeError as error:
            texts.append(str(error))

    with mock.patch.object(board, "_LOOK_SECONDS", (0.2, 0.2)):
        on_threads(8, stores, program)
    assert len(texts) == 8 and len(set(texts)) == 1
    assert "rank 0, 1, 2, 3, 4, 6, 7: gather '3' in forward; rank 5: the end of forward" in texts[0]
    assert not memory.values


@pytest.mark.parametrize("marked", [False, True])
def test_an_option_that_is_set_is_not_advised(marked: bool) -> None:
    """Where a rank skips a unit, the error names the option that lets it; but not where the unit has it already."""
    texts = {}
    for rank, units in enumerate(((0, 1, 2, 3), (0, 2, 3))):
        model = Model(board_on(CountingStore(Memory()), 0, 1), 4)
        for group in model.groups:
            group.store.options = SimpleNamespace(reduce_unused=marked)
        model.run("forward", [Collective("gather", model.groups[unit]) for unit in units])
        texts[rank] = model.monitor.history.text(*model.monitor.history.position(), 2)
    error = model.monitor.history.refuse(texts)
    assert "rank 0: gather '1' in forward; rank 1: gather '2' in forward" in error
    assert ("model[1].set_reduce_scatter_unused_params(True)" in error) is not marked
    assert ("model[1].set_reduce_scatter_unused_params(True, any_order=True)" in error) is marked


def test_an_error_names_its_rank_once() -> None:
    """What some rank has raised may come back as the error of another, and read "rank 1: rank 0: ..." then."""
    memory = Memory()
    for text in ("rank 0: FSDP parameters are on meta", "FSDP parameters are on meta"):
        boards = [board_on(CountingStore(memory), rank, 2) for rank in range(2)]
        with pytest.raises(RuntimeError, match=f"^{text}$"):
            compare(boards[1], Model(boards[1], 1), [], PassKind("forward"), RuntimeError(text))
        with pytest.raises(RuntimeError, match=text if text.startswith("rank") else f"^rank 1: {text}$"):
            boards[0].look(SimpleNamespace(position=lambda: None), shows=False)


class EmptiedStore(CountingStore):
    """One in which another rank deletes each key between a wait for it and the read, as TCPStore reads then."""

    def get(self, key: str, seconds: float | None = None) -> bytes:
        return b""


def test_a_key_that_is_deleted_while_it_is_read() -> None:
    """Its value was taken for a number, and the thread that says where ranks are ended with a ValueError."""
    keys = Keys(Connections(EmptiedStore(Memory())), "fsdp2", "1")
    keys.set("asked", "7")
    assert keys.read("asked") is None


class LateStore(CountingStore):
    """That of a rank whose first wait for a meeting runs out while the ``others`` end the meeting and go on."""

    others: Callable[[], None] | None = None

    def get(self, key: str, seconds: float | None = None) -> bytes:
        if self.others is not None and "/go/" in key:
            others, self.others = self.others, None
            others()
            time.sleep(0.002)  # longer than the wait: an earlier error would be another one
            raise dist.DistStoreError("wait timeout")
        return super().get(key, seconds)


def test_a_rank_that_wakes_late_from_the_first_meeting() -> None:
    """It looked at the board, where another showed what it did after the meeting: "different models", on equal ones."""
    memory, root = Memory(), SimpleNamespace(all_states=[])
    late = LateStore(memory)
    boards = [board_on(late, 0, 2), board_on(CountingStore(memory), 1, 2)]
    model, kind = Model(boards[1], 2), PassKind("forward")

    def goes_on() -> None:
        meetings = compare(boards[1], root, [], kind, None)
        model.monitor = RankMonitor(boards[1], model, lambda job: job(), meetings=meetings)
        model.monitor.begin(kind, agrees=False)
        model.monitor.before(Collective("gather", model.groups[0]))
        boards[1].look(model.monitor.history, shows=True)

    late.others = goes_on
    with mock.patch.object(board, "_LOOK_SECONDS", (0.001, 0.001)):
        assert compare(boards[0], root, [], kind, None) == 1
    boards[1].look(model.monitor.history, shows=True)
    boards[1].leave()
    assert not memory.values


def test_on_a_real_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = server.num_keys()
    stores = [dist.PrefixStore("job", dist.TCPStore("127.0.0.1", server.port, is_master=False)) for _ in range(4)]

    def program(model: Model, rank: int) -> None:
        for skip in (-1, -1, 1, -1):
            model.iterate(skip=skip)

    on_threads(4, stores, program)
    assert server.num_keys() == keys
