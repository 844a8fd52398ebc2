"""Events reach listeners and the debug log, and profiler ranges exist while a profiler runs."""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from fsdp2._trace import emit, listening, refresh, span


class Unit(NamedTuple):
    """The source of an event."""

    name: str


def test_a_listener_hears_what_happens_inside_its_block() -> None:
    listener = mock.Mock()
    emit("unshard", Unit("before"))
    with listening(listener):
        emit("unshard", Unit("layers.0"))
        emit("reshard", Unit("layers.0"))
    emit("unshard", Unit("after"))
    assert listener.call_args_list == [mock.call("unshard", "layers.0"), mock.call("reshard", "layers.0")]


def test_listeners_nest() -> None:
    outer, inner = mock.Mock(), mock.Mock()
    with listening(outer):
        emit("a", Unit(""))
        with listening(inner):
            emit("b", Unit(""))
        emit("c", Unit(""))
    assert outer.call_args_list == [mock.call(event, "") for event in "abc"]
    assert inner.call_args_list == [mock.call("b", "")]


def test_an_error_inside_the_block_ends_listening() -> None:
    listener = mock.Mock()
    with pytest.raises(KeyError), listening(listener):
        raise KeyError("inside")
    emit("late", Unit(""))
    assert not listener.called


def test_one_listener_may_listen_twice() -> None:
    listener = mock.Mock()
    with listening(listener):
        with listening(listener):
            emit("both", Unit(""))
        emit("one", Unit(""))
    assert listener.call_args_list == [mock.call(event, "") for event in ("both", "both", "one")]


@pytest.mark.parametrize("name", ["fsdp2", "torch.distributed.fsdp.fully_shard"])  # TORCH_LOGS=+fsdp: the latter
def test_the_debug_log_names_event_and_group(caplog: pytest.LogCaptureFixture, name: str) -> None:
    with caplog.at_level(logging.DEBUG, logger=name):
        refresh()
        emit("unshard", Unit("layers.0"), 4096)
        emit("root_post_backward", Unit(""))
    refresh()
    assert caplog.messages == ["FSDP::unshard (layers.0): 4,096 bytes", "FSDP::root_post_backward"]


def test_an_event_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        refresh()
        emit("unshard", Unit("layers.0"))
    refresh()
    assert caplog.messages == ["FSDP::unshard (layers.0)"]


def test_a_level_takes_effect_with_the_next_iteration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fsdp2"):
        emit("unshard", Unit("before refresh"))
        refresh()
    with caplog.at_level(logging.INFO, logger="fsdp2"):
        refresh()
        emit("unshard", Unit("above debug"))
    assert caplog.messages == []


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert isinstance(span("all_gather", Unit("layers.0")), contextlib.nullcontext)


def test_a_profiler_sees_spans_by_name() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with span("all_gather", Unit("layers.0")), span("root_post_backward", Unit("")):
            torch.ones(1)
    names = {event.name for event in profile.events()}
    assert {"FSDP::all_gather (layers.0)", "FSDP::root_post_backward"} <= names
