"""Recorded steps: what ran on real processes is what was forecast, and what a stream did is what its events say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import _trace
from fsdp2.forecasting.clock import Clock
from fsdp2.forecasting.rank import simulated_rank
from fsdp2.forecasting.timeline import UNITS, Timeline, chrome_trace
from tests.support import api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
WIDTH = 320


def build(mesh: Any) -> tuple[Any, Any]:
    """Return units of which two send enough for gloo's all-to-all and the others too little, and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh)
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
    with pytest.raises(ValueError, match=r"step.txt; expected a name that ends in"):
        result.save(tmp_path / "step.txt")


def test_picture(tmp_path):
    """A picture for reports, of lanes and memory."""
    pytest.importorskip("matplotlib")
    result = fsdp2.forecast(build, step, mesh={"shard": 4})
    result.save(tmp_path / "step.png", result.timeline)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
