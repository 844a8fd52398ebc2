"""What ranks write for each other, and what they say they do."""

from __future__ import annotations

from typing import Any
from unittest import mock

from fsdp2.ranks.board import Board, latest


def test_equal_wants_are_written_once() -> None:
    """By the first rank that has them, so that the cost of choosing does not grow with the ranks."""
    board: Any = Board.__new__(Board)
    board.rank, board._keys, board.meet = 1, mock.Mock(), mock.Mock(return_value=None)
    for before, written in ((0, 1), (1, 1)):
        board._keys.add.return_value = before + 1
        board.choose(0, '"this"', mock.Mock(), mock.Mock())
        assert board._keys.set.call_count == written


def test_the_latest_of_what_a_rank_did_is_told() -> None:
    history = mock.Mock()
    history.position.return_value = (0, 1)
    history.digests.return_value = [1, 2, 3]
    history.text.side_effect = lambda epoch, number, index: ["forward", "gather of 0", "gather of 1"][index]
    assert latest(history) == "gather of 1"
