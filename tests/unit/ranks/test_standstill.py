"""Where a process waits, in words, and the question where the others are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp2.ranks import standstill
from fsdp2.ranks.standstill import Standstill
from fsdp2.ranks.store import Connections, Keys
from tests.unit.meshes import gloo_mesh


def test_what_a_pass_does_is_said_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the function there says less."""
    frames = [(standstill._WAITING[2], "wait"), ("/home/me/train.py", "main")]
    monkeypatch.setattr(
        standstill,
        "_frames",
        lambda: [
            SimpleNamespace(f_code=SimpleNamespace(co_filename=path, co_name=name), f_lineno=7, f_lasti=0)
            for path, name in frames
        ],
    )
    assert standstill._place(lambda: "the gather of 0")[:2] == ("the gather of 0, at /home/me/train.py:7", True)


def test_who_goes_on_takes_the_question_back() -> None:
    """All ranks would answer it for ever, and none could ask another."""
    keys: Any = mock.Mock()
    keys.read.return_value = "5"
    asking = Standstill(keys, 0, 2, lambda: "")
    asking._question = standstill._Question(5, mine=True)
    asking.look()
    assert mock.call("asked") in keys.delete.call_args_list and not asking._question.number


def test_a_question_from_before_a_restart_is_forgotten() -> None:
    """torchrun keeps the store, and who asked does not exist any more."""
    keys: Any = mock.Mock()
    keys.has.return_value = True
    with gloo_mesh():
        starting = Standstill(keys, 0, 1, lambda: "")
        starting.start()
        starting.stop()
    assert mock.call("asked") in keys.delete.call_args_list


def standing(line: int) -> Iterator[standstill._Place]:
    """A rank that waits for its device, at one line."""
    return itertools.repeat(standstill._Place(f"train.py:{line}", False, 1))


def going_on(line: int) -> Iterator[standstill._Place]:
    """A rank that passes a line again and again."""
    return (standstill._Place(f"train.py:{line}", False, visit) for visit in itertools.count())


@pytest.mark.parametrize(
    ("ranks", "logs"),
    [
        ([standing(7), standing(9)], True),
        ([standing(7), standing(7)], False),
        ([standing(7), going_on(9)], False),
        ([standing(7), None], False),
        ([standing(7), standing(9), None], True),
    ],
    ids=["at different lines", "at one line", "one goes on", "one has ended", "one of three has ended"],
)
def test_devices_that_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: list[Any], logs: bool
) -> None:
    """With NCCL no main thread waits in a collective, and ``if rank == 0: weight.full_tensor()`` hung without a word. A
    long step, a slow batch and a rank that saves its checkpoint last are nothing to be told of."""
    now, place = 0.0, standing(0)
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(standstill, "_place", lambda doing: next(place))
    keys = Keys(Connections(dist.HashStore()), "job", "standstill")
    watches = [Standstill(keys, rank, len(ranks), str, on_devices=True) for rank in range(len(ranks))]
    for rank, other in enumerate(ranks):
        if other is None:
            keys.set(f"at/{rank}", f'[{standstill._ENDED}, "{standstill._GONE}", null]')
    for _ in range(40):
        now += standstill._LOOK_SECONDS
        for watch, other in zip(watches, ranks):
            if other is not None:
                place = other
                watch.look()
    where = r"rank 0 does not go on, .* Rank 0: at train.py:7, for \d+ s; rank 1: at train.py:9, for \d+ s"
    assert bool(caplog.messages) == logs
    assert not logs or re.match(where, caplog.messages[0]), caplog.messages
