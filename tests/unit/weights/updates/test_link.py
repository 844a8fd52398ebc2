"""What a sender says in a process group when it cannot go on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from fsdp2.weights.updates import link
from fsdp2.weights.updates.link import ToGroup


@pytest.mark.parametrize(("fails", "said"), [("to", ["abort"]), ("broadcast", ["bucket"])])
def test_nothing_is_said_while_receivers_wait_for_a_buffer(
    monkeypatch: pytest.MonkeyPatch, fails: str, said: list[str]
) -> None:
    """They would take it for the buffer; they do not wait for one that does not fit on the sender's device."""
    monkeypatch.setattr(link, "_InGroup", mock.Mock())
    monkeypatch.setattr(link, "broadcast", mock.Mock(side_effect=MemoryError))
    to: Any = ToGroup(mock.Mock())
    to._group.meet.return_value = []
    to.meet(None)
    with pytest.raises(MemoryError):
        to.deliver(mock.Mock(buffer=mock.Mock(to=mock.Mock(side_effect=MemoryError if fails == "to" else None))))
    to.abort(MemoryError())
    assert [call.args[0] for call in to._group.say.call_args_list] == said
