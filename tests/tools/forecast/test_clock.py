"""Streams on which time passes: kernels one behind the other, waits, and collectives of one communicator in series."""

from __future__ import annotations

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


def test_constants_are_checked_where_they_are_made():
    """Whoever makes them: a file, an option, or a script. A link without latency is one (the demo's has none)."""
    ideal = Hardware(links=(Link(8, 0.0, 1e9), Link(2, 1e-4, 1e9)))
    assert [link.ranks for link in ideal.links] == [2, 8], "sorted"
    assert ideal.collective_seconds(8e9, range(8)) == pytest.approx(7.0) and ideal.link(4).seconds == 0.0
    for wrong in ({"ranks_per_node": 0}, {"ranks_per_node": 2.5}, {"flops_per_second": float("nan")}, {"links": ()}):
        with pytest.raises(ValueError, match=r"expected (a|a whole) number above 0|at least one link"):
            Hardware(**wrong)
    with pytest.raises(ValueError, match=r"links for \[2, 2\] ranks; expected at least one link, and one for each"):
        Hardware(links=(Link(2, 1e-4, 1e9), Link(2, 2e-4, 1e9)))
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
