"""Recorded steps: what ran on real processes is what was forecast, and what a stream did is what its events say."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import _trace
from fsdp2.comm import reduce
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.page import page
from fsdp2.tools.forecast.pictures import COLOURS, KINDS, draw_lanes, picture
from fsdp2.tools.forecast.rank import simulated_rank
from fsdp2.tools.forecast.timeline import UNITS, Exposed, Span, Timeline, chrome_trace, on_one_clock
from tests.support import api
from tests.support.parity import shard_each
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
WIDTH = 320


def build(mesh: Any) -> tuple[Any, Any]:
    """Return units of which two send enough for gloo's all-to-all and the others too little, and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    shard_each(model, fsdp2, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: Any) -> None:
    """Train once."""
    model(torch.ones(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def communicated(timeline: Timeline) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return launches and bytes by lane, kind and unit."""
    launches, nbytes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for span in timeline.spans:
        if span.ranks:
            launches[span.lane, span.kind, span.unit] += 1
            nbytes[span.lane, span.kind, span.unit] += span.nbytes
    return {key: (launches[key], nbytes[key]) for key in launches}


def units(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the forwards and backwards of units in their order."""
    return sorted((span.kind, span.unit) for span in timeline.spans if span.lane == UNITS)


@pytest.fixture
def expected(world: int) -> Timeline:
    """Return what is forecast."""
    return fsdp2.forecast(build, step, mesh={"shard": world}, backend="gloo").timeline


@on_ranks(2)
def test_real_steps(rank, world, expected):
    """One timeline a step: collectives, bytes and units as forecast, in order, and the ranks side by side."""
    model, optimizer = build(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    step(model, optimizer)
    with fsdp2.record_steps(model) as record:
        for _ in range(2):
            step(model, optimizer)
    assert len(record.steps) == 2
    for timeline in record.steps:
        assert communicated(timeline) == communicated(expected)
        assert units(timeline) == units(expected)
        for span in timeline.spans:
            assert 0 <= span.begin <= span.end
        for wait in timeline.waits:
            assert 0 <= wait.begin <= wait.end <= timeline.seconds
        kinds = [point.by_kind for point in timeline.memory]
        full = max(4 * (WIDTH + 1) * WIDTH, 0)
        assert full <= max(by_kind["gathered"] for by_kind in kinds) <= 2 * full
        assert kinds[-1]["gathered"] == 0
        forwards = [s.unit for s in timeline.spans if s.lane == UNITS and s.kind == "forward"]
        assert forwards == ["0", "1", "2"]
    ranks = record.of_ranks()
    assert [timeline.rank for timeline in ranks] == [0, 1] and ranks[rank] == record.timeline
    assert _trace.recorder is None and not _trace.recording


@on_ranks(2)
def test_ranks_have_one_clock(rank, world):
    """Each rank's times began with its own step, so that none was ever seen to be late.

    The second rank is on a host here whose clock is 1000 seconds ahead, and it begins its forward when the first one
    has begun.
    """
    model, optimizer = build(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    step(model, optimizer)
    real = time.perf_counter
    token = torch.zeros(1)

    def begun(event: str, name: str) -> None:
        if rank == 0 and event == "root_pre_forward":
            torch.distributed.send(token, 1)

    with mock.patch.object(time, "perf_counter", lambda: real() + 1000.0 * rank):
        with fsdp2.record_steps(model) as record, _trace.listening(begun):
            if rank == 1:
                torch.distributed.recv(token, 0)
            step(model, optimizer)
        first = record.timeline
        assert first.begin == 0.0
        ranks = record.of_ranks()
    assert min(one.begin for one in ranks) == 0.0
    assert max(one.begin for one in ranks) < 500.0, "the ranks' clocks were taken for one"
    assert ranks[rank] == record.timeline
    shift = record.timeline.begin
    assert [span.begin for span in record.timeline.spans] == [span.begin + shift for span in first.spans]
    assert record.of_ranks()[rank].seconds == first.seconds


@on_ranks(2)
def test_a_rank_without_a_step(rank, world):
    """It raised alone, and the others waited for it."""
    model, optimizer = build(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    with fsdp2.record_steps(model) as record:
        step(model, optimizer)
    record.steps = record.steps if rank else []
    with pytest.raises(RuntimeError, match=r"got no whole step on the ranks \[0\], expected one on every rank"):
        record.of_ranks()


def test_the_late_rank_is_seen():
    """The second rank's clock is 50 s behind; its step begins 2 s after the first rank's, and the third's 1 s before.

    One of the meetings took long: the median leaves it out.
    """
    span, wait, point = Span("compute", "mm", 0.5, 1.0, "0"), Exposed(0.25, 0.5, "0"), (0.0, {"shards": 8})
    ranks = []
    for rank, started in enumerate((100.0, 52.0, 99.0)):
        one = Timeline.of("recorded", rank, [span], [wait], [point], (0.0, 4.0))
        ranks.append(replace(one, started=started))
    met = [[10.0, 20.0, 30.0], [-40.0, -30.0, -13.0], [10.0, 20.0, 30.0]]
    moved = on_one_clock(ranks, met)
    assert [one.begin for one in moved] == [1.0, 3.0, 0.0]
    assert [one.spans[0].begin for one in moved] == [1.5, 3.5, 0.5]
    assert [(one.waits[0].begin, one.memory[0].time, one.end) for one in moved][1] == (3.25, 3.0, 7.0)
    assert on_one_clock(moved, met) == moved
    assert Timeline.from_json(moved[1].to_json()) == moved[1]


def test_on_streams():
    """Times are those of events on the streams that collectives and waits are on."""
    clock = Clock()
    with simulated_rank({"replicate": 2, "shard": 4}, clock) as mesh:
        model, optimizer = build(mesh)
        step(model, optimizer)
        begin = clock.begin()
        with fsdp2.record_steps(model) as record:
            step(model, optimizer)
            assert clock.host <= begin, "the host waited inside of the step"
        assert clock.host == clock.now
    recorded = sorted((s.kind, s.begin, s.end, s.nbytes) for s in record.timeline.spans if s.ranks)
    real = sorted((s.kind, s.begin - begin, s.end - begin, s.nbytes) for s in clock.spans if s.group)
    assert [kind for kind, *_ in recorded] == [kind for kind, *_ in real] and len(real) > 6
    first = min(one[1] for one in real) - min(one[1] for one in recorded)
    for (_, begun, ended, nbytes), (_, real_begin, real_end, real_nbytes) in zip(recorded, real):
        assert nbytes == real_nbytes
        # one that waits for its communicator has been on its stream since before
        assert begun + first <= real_begin + 1e-9 and ended + first == pytest.approx(real_end)
    waited = sum(wait.end - wait.begin for wait in clock.exposed)
    assert record.timeline.exposed_seconds == pytest.approx(waited) and waited > 0


def test_nothing_to_record():
    """A module without units, and a block without a forward."""
    with pytest.raises(ValueError, match="Linear has no units"), fsdp2.record_steps(nn.Linear(2, 2)):
        pass
    with simulated_rank({"shard": 2}, Clock()) as mesh:
        model, _ = build(mesh)
        with fsdp2.record_steps(model) as record:
            pass
    with pytest.raises(RuntimeError, match="recorded no forward"):
        print(record.timeline)


@on_ranks(2)
def test_other_models_are_left_out(rank, world, expected):
    """A loop trains a second model, whose units have the same names: its steps counted as steps of the first one, and
    the timeline was that of the second."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    (model, optimizer), (other, others) = build(mesh), build(mesh)
    step(model, optimizer)
    step(other, others)
    with fsdp2.record_steps(model) as record:
        for _ in range(3):
            step(model, optimizer)
            step(other, others)
            with torch.no_grad():
                other(torch.ones(1, WIDTH))
    assert len(record.steps) == 3
    for timeline in record.steps:
        assert communicated(timeline) == communicated(expected)
        assert units(timeline) == units(expected)
        assert max(point.by_kind["gathered"] for point in timeline.memory) <= 2 * 4 * (WIDTH + 1) * WIDTH


@on_ranks(2)
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_leaves_the_steps_before_it(rank, world, expected, error):
    """They were lost, and the record said that there was no forward. A step that was not finished is none."""
    model, optimizer = build(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    with pytest.raises(error), fsdp2.record_steps(model) as record:
        for _ in range(2):
            step(model, optimizer)
        loss = model(torch.ones(4, WIDTH)).sum()
        raise error
    assert len(record.steps) == 2
    assert communicated(record.timeline) == communicated(expected)
    loss.backward()
    with pytest.raises(error), fsdp2.record_steps(model) as record:
        step(model, optimizer)
        raise error  # between two steps: while a batch is loaded, say
    assert len(record.steps) == 1
    with pytest.raises(error), fsdp2.record_steps(model) as record:
        loss = model(torch.ones(4, WIDTH)).sum()
        raise error
    with pytest.raises(RuntimeError, match=r"ended by an exception in its first step, so no whole step was recorded"):
        print(record.timeline)
    loss.backward()


@on_ranks(2)
def test_a_recovery_waits_for_what_was_recorded(rank, world):
    """While steps were recorded, ``reset_iter_state`` did not wait for reductions on their way: what it throws into
    one ended at the generator that attributed it to its unit."""
    model, optimizer = build(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    with fsdp2.record_steps(model):
        step(model, optimizer)
        failing = model[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(lambda grad: 1 / 0) and None)
        with pytest.raises(ZeroDivisionError):
            step(model, optimizer)
        failing.remove()
        with mock.patch("fsdp2.comm.reduce._wait_for", wraps=reduce._wait_for) as waits:
            model.reset_iter_state()
        assert waits.called
        waits.reset_mock()  # it keeps what it was called with
        step(model, optimizer)


def test_an_error_ends_it():
    """What raises in the block leaves nothing that records."""
    with simulated_rank({"shard": 2}, Clock()) as mesh:
        model, _ = build(mesh)
        with pytest.raises(KeyError), fsdp2.record_steps(model):
            raise KeyError
    assert _trace.recorder is None and not _trace.recording


def test_one_format(tmp_path):
    """A timeline is written and read again; pages and traces show several, and need nothing from elsewhere."""
    result = fsdp2.forecast(build, step, mesh={"replicate": 2, "shard": 4})
    other = Timeline.from_json(result.timeline.to_json())
    assert other == result.timeline
    result.save(tmp_path / "step.json", other)
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace == chrome_trace([other, other])
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert len(complete) == 2 * (len(other.spans) + len(other.waits))
    result.save(tmp_path / "step.html", other)
    page = (tmp_path / "step.html").read_text()
    assert "http" not in page and "/*DATA*/" not in page and page.count('"forecast, h100, rank 0"') == 2
    with pytest.raises(ValueError, match=r"step.txt: expected a name that ends in"):
        result.save(tmp_path / "step.txt")


def test_colours_tell_meanings_apart():
    """Shards had the colour of compute, and the state of an optimizer nearly that of the replicate lane. Parameters
    that are gathered, and gradients, have those of their lanes on purpose; the page has the same colours."""
    shared = {kind for kind, colour in KINDS.items() if colour in COLOURS.values()}
    assert shared == {"gathered", "gradients"} and len({*KINDS.values()}) == len(KINDS)
    assert KINDS["gathered"] == COLOURS["gather"] and KINDS["gradients"] == COLOURS["reduce"]
    result = fsdp2.forecast(build, step, mesh={"shard": 2}, steps=1)
    html = page([result.timeline])
    assert all(colour in html for colour in (*KINDS.values(), *COLOURS.values()))
    assert not result.timeline.memory_in_part


def test_picture(tmp_path):
    """A picture for reports, of lanes and memory."""
    pytest.importorskip("matplotlib")
    result = fsdp2.forecast(build, step, mesh={"shard": 4})
    result.save(tmp_path / "step.png", result.timeline)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_lanes_and_memory_of_a_picture_have_one_scale():
    """Lanes were drawn from the first span on and memory from the beginning of the step, 5 ms later in one case.

    Here the model's first span begins when the host has prepared a batch for 3 seconds.
    """
    matplotlib = pytest.importorskip("matplotlib.figure")
    spans = [Span(UNITS, "forward", 3.0, 4.0, "0"), Span("gather", "all_gather", 3.5, 4.5, "0", 8, 2, "shard")]
    memory = [(0.0, {"shards": 1 << 20}), (3.0, {"shards": 2 << 20})]
    timeline = Timeline.of("recorded", 0, spans, [Exposed(3.0, 3.5, "0")], memory, (0.0, 5.0))
    lanes = matplotlib.Figure().subplots()
    draw_lanes(lanes, timeline.spans, timeline.waits, start=0.0)
    drawn = sorted(path.get_extents().x0 for bars in lanes.collections for path in bars.get_paths())
    assert drawn == pytest.approx([3000.0, 3000.0, 3500.0])
    figure = picture([timeline])
    first, second = figure.axes
    assert min(p.get_extents().x0 for bars in first.collections for p in bars.get_paths()) == pytest.approx(3000.0)
    assert min(p.get_extents().x0 for bars in second.collections for p in bars.get_paths()) == 0.0


def test_memory_lasts_until_the_step_ends():
    """On the page of several ranks, the memory of one that began later ended too early by as much, or went back to
    there: its step of 10 ms, from 8 ms on, had memory until 10 ms."""
    timeline = Timeline.of("recorded", 1, [], [], [(0.0, {"shards": 8}), (0.009, {"shards": 4})], (0.0, 0.01))
    text = page([timeline.beginning_at(0.008)])
    data = json.loads(text.partition("const steps = ")[2].partition(";\n")[0])
    assert data[0]["memory"] == [[8000.0, {"shards": 8}], [17000.0, {"shards": 4}], [18000.0, {"shards": 4}]]
    assert "step.seconds" not in text.partition("function drawCurve")[2].partition("function draw()")[0]


def test_steps_that_differ_too_much_have_scales_of_their_own():
    """The forecast for an H100 beside a record of a laptop was an invisible sliver at the left edge."""
    pytest.importorskip("matplotlib.figure")
    span = Span(UNITS, "forward", 0.0, 1e-3, "0")
    short = Timeline.of("forecast", 0, [span], [], [], (0.0, 1e-3))
    long = Timeline.of("recorded", 0, [replace(span, end=0.05)], [], [(0.0, {"shards": 1 << 20})], (0.0, 0.05))
    figure = picture([short, long])
    assert [axes.get_xlim()[1] for axes in figure.axes] == pytest.approx([1.0, 50.0, 50.0])
    assert "own scale" in figure.axes[-1].get_xlabel()
    ends = [path.get_extents().x1 for area in figure.axes[-1].collections for path in area.get_paths()]
    assert ends == pytest.approx([50.0]), "memory lasts until the step ends"
    assert figure.axes[-1].get_ylabel() == "MiB, only these" and long.memory_in_part  # shards, without the rest
    near = replace(short, seconds=0.04)
    assert [axes.get_xlim()[1] for axes in picture([near, long]).axes] == pytest.approx([50.0, 50.0, 50.0])
