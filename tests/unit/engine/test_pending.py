"""What forwards leave for backwards."""

from __future__ import annotations

from unittest import mock

import pytest

from fsdp2.engine.pending import Pending


@pytest.mark.parametrize("again", [0, 3])
def test_a_unit_that_ranks_may_skip_reduces_after_its_last_call(again: int) -> None:
    """A graph that was retained reaches its call ``again``; then later calls were taken for fewer than they are."""
    group = mock.Mock()
    pending = Pending()
    pending.expect(group, inputs_need_none=False)
    assert all([pending.leave_call(group) for _ in range(1 + again)])
    for _ in range(2):
        pending.expect(group, inputs_need_none=False)
    assert [pending.leave_call(group) for _ in range(2)] == [False, True]
