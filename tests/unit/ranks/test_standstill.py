"""Where a process waits, in words, and the question where the others are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fsdp2.ranks import standstill
from fsdp2.ranks.standstill import Standstill
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
