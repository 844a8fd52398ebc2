"""Streams on which time passes: kernels one behind the other, waits, and collectives of one communicator in series."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.cost import H100, Hardware, Link
from fsdp2.tools.forecast.rank import simulated_rank

MACHINE = Hardware(
    flops_per_second=1e12,
    memory_bytes_per_second=1e9,
    ranks_per_node=64,
    links=(Link(4, 1.0, 1e9), Link(64, 4.0, 1e9)),
)
KIB = 1 << 10


def seconds(nbytes: int) -> float:
    """Return how long a kernel that touches so many bytes takes."""
    return nbytes / MACHINE.memory_bytes_per_second


@pytest.fixture
def clock():
    """Return a clock on which the first of four ranks runs."""
    clock = Clock(MACHINE)
    with simulated_rank({"shard": 4}, clock):
        yield clock


def test_kernels_take_what_they_touch_or_compute(clock):
    """An element-wise kernel is bound by memory, a large product by arithmetic; views cost nothing."""
    x = torch.empty(KIB, KIB)
    clock.begin()
    x.view(-1)[3:].t()
    assert clock.now == 0
    x.add(x)
    assert clock.now == pytest.approx(seconds(3 * 4 * KIB * KIB))
    before = clock.now
    slow = replace(MACHINE, flops_per_second=1e9)
    clock.hardware = slow
    x @ x
    assert clock.now - before == pytest.approx(2 * KIB**3 / 0.5e9)  # four bytes: half the rate of two


def test_streams_run_beside_each_other_and_wait_for_events(clock):
    """A wait on the compute stream is exposed; one on another stream is not."""
    x, side = torch.empty(KIB), clock.Stream()
    with clock.stream(side):
        x.add_(1)
        done = side.record_event()
        x.add_(1)
    clock.unit = "head"
    assert clock.compute.time == 0
    one = seconds(2 * 4 * KIB)
    clock.compute.wait_event(done)
    assert clock.compute.time == pytest.approx(one) and side.time == pytest.approx(2 * one)
    assert [(wait.begin, wait.unit) for wait in clock.exposed] == [(0, "head")]
    side.wait_stream(clock.compute)
    assert side.time == pytest.approx(2 * one) and len(clock.exposed) == 1
    done.synchronize()
    with clock.stream(clock.Stream()):
        x.add_(1)
    assert clock.now == pytest.approx(2 * one)  # what the host starts after a wait begins after it


def test_collectives_of_one_communicator_are_serial(clock):
    """Also from several streams; what each rank sends around is counted, an all-reduce goes round twice."""
    one, side = 1.0 + 4 * KIB * 3 / 4 / 1e9, clock.Stream()
    with clock.stream(side):
        dist.all_gather_into_tensor(torch.empty(KIB), torch.empty(KIB // 4))
    assert clock.compute.time == 0 and side.time == pytest.approx(one)
    dist.reduce_scatter_tensor(torch.empty(KIB // 4), torch.empty(KIB))
    assert clock.compute.time == pytest.approx(2 * one)
    dist.all_reduce(torch.empty(KIB))
    assert clock.now == pytest.approx(2 * one + 1.0 + 2 * 4 * KIB * 3 / 4 / 1e9)
    kinds = [(span.kind, span.nbytes, span.ranks) for span in clock.spans if span.group]
    assert kinds == [(kind, 4 * KIB, 4) for kind in ("all_gather", "reduce_scatter", "all_reduce")]


def test_functional_collectives_run_until_they_are_waited_for(clock):
    """As those of tensor parallelism do."""
    x = torch.empty(KIB)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 4, dist.group.WORLD.group_name)
    x.add_(1)
    assert clock.compute.time == pytest.approx(seconds(2 * 4 * KIB))
    assert gathered.shape == (4 * KIB,)
    torch.ops._c10d_functional.wait_tensor(gathered)
    assert [span.lane for span in clock.spans if span.group] == ["world"]
    assert clock.compute.time == pytest.approx(1.0 + 16 * KIB * 3 / 4 / 1e9)


def test_links():
    """Stated sizes are as stated; between them costs grow, beyond them latency grows with the ranks."""
    for link in H100.links:
        assert H100.link(link.ranks) == link
    middle = MACHINE.link(16)
    assert middle.seconds == pytest.approx(2.0) and middle.bytes_per_second == pytest.approx(1e9)
    assert MACHINE.link(128).seconds == pytest.approx(8.0)
    assert MACHINE.link(2).seconds == pytest.approx(0.5)
    assert H100.collective_seconds(1 << 30, range(1)) == 0
    # eight ranks of one node, or one of each of eight nodes: there one network adapter is what a rank has
    assert H100.collective_seconds(1 << 30, range(0, 64, 8)) > 5 * H100.collective_seconds(1 << 30, range(8))


GB, SHARE = 1e9, 37.5e9
INSIDE = {8: 360e9, 16: 300e9, 64: 300e9, 512: 300e9}
"""Bytes per second of an edge of a ring: the links of a node, else what its eight ranks have together."""


@pytest.mark.parametrize("size", [8, 16, 64, 512])
def test_bytes_of_a_ring(size):
    """Its ranks share the network of a node, which the ring enters once: every edge passes all that the kind needs."""
    machine = without_latency(H100)
    edge = GB / INSIDE[size]
    for kind, share in {
        "all_gather": (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_reduce": 2 * (size - 1) / size,
        "broadcast": 1,
        "reduce": 1,
    }.items():
        assert machine.collective_seconds(GB, range(size), kind) == pytest.approx(edge * share, rel=1e-6), kind


@pytest.mark.parametrize("size", [8, 16, 64, 512])
def test_bytes_of_an_exchange(size):
    """Each rank has its own share of the network for (n - 8) / n of its bytes, which a ring would pass eight times as
    fast; beside it, the links inside the node take the rest. Charged like a ring, an exchange was too fast."""
    machine = without_latency(H100)
    rows = [GB / size] * size
    seconds = machine.exchange_seconds(rows, rows, range(size), 3)
    near, far = GB * 7 / size / 360e9, GB * (size - 8) / size / SHARE
    assert seconds == pytest.approx(max(near, far), rel=1e-6)
    ring = machine.collective_seconds(GB, range(size), "all_gather")
    assert seconds / ring == pytest.approx({8: 1, 16: 4.27, 64: 7.11, 512: 7.89}[size], rel=0.01)
    pieces = machine.collective_seconds(GB, range(size), "scatter")
    assert pieces == machine.collective_seconds(GB, range(size), "gather") == pytest.approx(seconds)


def test_uneven_exchanges():
    """What a rank keeps costs nothing, directions overlap, and it matters on which node the others are."""
    machine, ranks = without_latency(H100), range(16)

    def seconds(received: dict[int, float], sent: dict[int, float]) -> float:
        rows = [[one.get(rank, 0.0) for rank in ranks] for one in (received, sent)]
        return machine.exchange_seconds(rows[0], rows[1], ranks, 9)

    assert seconds({9: GB}, {9: GB}) == 0
    assert seconds({8: GB}, {15: GB / 2}) == pytest.approx(GB / 360e9)
    assert seconds({8: GB}, {0: GB}) == pytest.approx(GB / SHARE)
    assert seconds({0: GB / 2, 7: GB / 2}, {0: GB}) == pytest.approx(GB / SHARE)
    slow = replace(machine, links=(machine.links[0], Link(16, 0.0, 30e9)))
    assert slow.exchange_seconds([GB / 16] * 16, [0.0] * 16, ranks, 9) == pytest.approx(GB / 2 / (30e9 / 8))
    assert machine.exchange_seconds([GB], [GB], [3], 0) == 0


def test_messages_and_trees():
    """A message takes the link of two ranks; a small all-reduce goes up and down a tree, where a ring has more steps.

    An all-reduce of a few numbers over 512 ranks was charged 2.2 ms, the latency of a ring.
    """
    first = H100.link(2).seconds
    assert H100.message_seconds(GB, (0, 1)) == pytest.approx(first + GB / 360e9)
    assert H100.message_seconds(GB, (0, 8)) == pytest.approx(first + GB / SHARE)
    latencies = {size: H100.collective_seconds(0, range(size), "all_reduce") for size in (2, 8, 64, 512)}
    assert latencies == {
        2: first,
        8: H100.link(8).seconds,
        64: pytest.approx(12 * first),
        512: pytest.approx(18 * first),
    }
    assert H100.collective_seconds(0, range(512)) == H100.link(512).seconds > 10 * latencies[512]


def without_latency(machine: Hardware) -> Hardware:
    """Return the machine with links without latency."""
    return replace(machine, links=tuple(replace(link, seconds=0.0) for link in machine.links))


def test_an_exchange_has_the_bytes_of_its_rows():
    """Of process groups and functional ones, even and not: rank 0 keeps the first row."""
    machine = replace(without_latency(MACHINE), ranks_per_node=2, network_bytes_per_second=1e8)
    clock, row = Clock(machine), KIB * 4
    with simulated_rank({"shard": 4}, clock):
        group, both = dist.group.WORLD, torch.empty(4 * KIB)
        whole = dict.fromkeys(("even", "uneven", "functional", "list", "send", "broadcast"), 0.0)
        for name in whole:
            begin = clock.begin()
            if name == "even":
                dist.all_to_all_single(both, torch.empty_like(both))
            elif name == "uneven":
                dist.all_to_all_single(both, torch.empty_like(both), [KIB, 3 * KIB, 0, 0], [KIB, 3 * KIB, 0, 0])
            elif name == "functional":
                out = torch.ops._c10d_functional.all_to_all_single(both, [KIB] * 4, [KIB] * 4, group.group_name)
                torch.ops._c10d_functional.wait_tensor(out)
            elif name == "list":
                dist.all_to_all([*both.chunk(4)], [*torch.empty_like(both).chunk(4)])
            elif name == "send":
                dist.send(both, 2)
            else:
                dist.broadcast(both, 1)
            whole[name] = clock.now - begin
        assert [span.kind for span in clock.spans] == ["broadcast"]
    even = pytest.approx(2 * row / 1e8, rel=1e-3)  # two rows go to the other node
    assert whole == {
        "even": even,
        "uneven": pytest.approx(3 * row / 1e9, rel=1e-3),
        "functional": even,
        "list": even,
        "send": pytest.approx(4 * row / 1e8, rel=1e-3),
        "broadcast": pytest.approx(4 * row / 2e8, rel=1e-3),
    }


def test_constants_are_checked_where_they_are_made():
    """Whoever makes them: a file, an option, or a script. A link without latency is one (the demo's has none).

    A list of links was "expected a number above 0", as was a name that is none.
    """
    ideal = Hardware(links=(Link(8, 0.0, 1e9), Link(2, 1e-4, 1e9)))
    assert [link.ranks for link in ideal.links] == [2, 8], "sorted"
    assert ideal.collective_seconds(8e9, range(8)) == pytest.approx(7.0) and ideal.link(4).seconds == 0.0
    for wrong in ({"ranks_per_node": 0}, {"ranks_per_node": 2.5}, {"flops_per_second": float("nan")}, {"links": ()}):
        with pytest.raises(ValueError, match=r"expected (a|a whole) number above 0|at least one link"):
            Hardware(**wrong)
    with pytest.raises(ValueError, match=r"links for \[2, 2\] ranks; expected at least one link, and one for each"):
        Hardware(links=(Link(2, 1e-4, 1e9), Link(2, 2e-4, 1e9)))
    for value in (3, (1, 2), {"ranks": 2}, None):
        with pytest.raises(ValueError, match=r"links=.*: expected a tuple of Links"):
            Hardware(links=value)
    with pytest.raises(ValueError, match="name=None: expected a text"):
        Hardware(name=None)
    assert Hardware(links=[Link(2, 1e-4, 1e9)]) == Hardware(links=(Link(2, 1e-4, 1e9),))
    with pytest.raises(ValueError, match=r"seconds=-1: expected a number of at least 0"):
        Link(2, -1, 1e9)


def test_every_constant_is_printed():
    """Who reads a forecast sees what it is based on."""
    text = str(replace(H100, memory_bytes_per_second=7e11))
    assert "7" in text and all(f"{link.ranks} ranks" in text for link in H100.links)


def test_a_process_group_is_in_the_way():
    """A forecast does not replace the process group of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="process of its own"), simulated_rank({"shard": 4}, Clock()):
            pass
    finally:
        dist.destroy_process_group()


def test_errors_look_as_before(monkeypatch):
    """torch has "[rank0]: " put before each line of an error that nobody catches, once for each process group that was
    made, also when the group is gone: with three forecasts a script's error had it three times."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = sys.excepthook
    with simulated_rank({"shard": 4}, Clock()):
        assert sys.excepthook is before
    assert sys.excepthook is before
