"""What only a device with streams gets wrong, on the simulated one: the row of streams, and the fills' own order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp2.tools.check.models import Small
from fsdp2.tools.check.on_streams import watched
from fsdp2.tools.check.ordering import Ordering
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.strict import filled_memory
from fsdp2.tools.check.trial import Trial, loss_of, shard
from tests.support import api
from tests.support.fake import fake_mesh
from tests.support.streams import Device, Mistake

pytestmark = api.fsdp2_only


@pytest.fixture
def place() -> Iterator[Place]:
    """One of four ranks, the others pretended."""
    with fake_mesh(4):
        yield Place(0, 4, 0, torch.device("cpu"), dist.HashStore())


def watched_on(place: Place, ignored: tuple[str, ...] | None) -> Outcome:
    """Run the check on a simulated device, which stops at the first mistake where a wait is left out."""

    @contextmanager
    def watcher() -> Iterator[Device]:
        with suppress(Mistake):
            yield device

    with Device(ignored) as device:
        return watched(place, watcher)


def test_order_of_streams(place):
    """Nothing is noticed as it is."""
    assert watched_on(place, None).verdict == "right"


@pytest.mark.parametrize("forgotten", [("wait", "finish_gather", "_ready"), ("wait", "after", "start")])
def test_a_wait_that_is_left_out(place, forgotten):
    """The row says which kernel does not wait for which."""
    outcome = watched_on(place, forgotten)
    assert outcome.verdict == "wrong" and "does not wait for" in outcome.text


def test_fills_are_in_order(place):
    """Overwriting new memory is itself ordered with all that uses the memory: a fill makes no mistake of its own."""
    trial = Trial(place)
    with Device() as device, filled_memory():
        model = trial.sharded(Small, partial(shard, mesh=trial.mesh()))
        for step in range(2):
            loss_of(model(trial.rows(step, model.width).chunk(4)[0])).backward()
    assert not device.mistakes


@pytest.mark.parametrize("kind", [torch.cuda.Event, torch.cuda.Stream])
@pytest.mark.parametrize("answer", [True, False])
def test_a_query_whose_answer_is_that_all_is_done(kind, answer, monkeypatch):
    """What the host then launches is behind that, as after a wait of the host. The check knew of waits alone."""
    first, other = SimpleNamespace(cuda_stream=1), SimpleNamespace(cuda_stream=2)
    event = SimpleNamespace()
    monkeypatch.setattr(torch.cuda.Event, "record", lambda event, stream: None)
    monkeypatch.setattr(kind, "query", lambda asked: answer)
    with Ordering() as ordering:
        accesses = ordering._accesses
        accesses.use(first.cuda_stream, [], [(0, 8)], "a copy")
        torch.cuda.Event.record(event, first)
        assert kind.query(event if kind is torch.cuda.Event else first) is answer
        accesses.use(other.cuda_stream, [(0, 8)], [], "a kernel")
    assert bool(ordering.mistakes) is not answer
