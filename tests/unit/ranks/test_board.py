"""What ranks write for each other, and what they say they do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp2.ranks.board import Board, latest
from fsdp2.ranks.store import Connections, Keys


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


def reached(epoch: int, number: int, count: int) -> Any:
    """The history of a rank that has come so far."""
    history = mock.Mock()
    history.position.return_value = (epoch, number)
    history.digests.return_value = list(range(count))
    history.text.return_value = "backward"
    return history


@pytest.mark.parametrize(
    ("others", "refused"),
    [
        ([(2, 3, 7)], False),
        ([(2, 3, 6)], True),
        ([(2, 2, 9)], True),
        ([(3, 0, 1)], False),
        ([(3, 0, 1), (2, 2, 9)], True),
    ],
)
def test_a_rank_that_launches_more_than_one_that_ended(others: list[tuple[int, int, int]], refused: bool) -> None:
    """Of several, the one that came least far tells. A rank that all others only wait for goes on."""
    keys = Keys(Connections(dist.HashStore()), "job", "1")
    for rank, place in enumerate(others, 1):
        Board(keys, rank, tuple(range(len(others) + 1))).end(f"rank {rank} ended", reached(*place), None)
    board = Board(keys, 0, tuple(range(len(others) + 1)))
    if not refused:
        board.refuse_ended(reached(2, 3, 7))
        return
    with pytest.raises(RuntimeError, match=rf"^rank {len(others)} ended; rank 0 waits for it in backward\. Expected: "):
        board.refuse_ended(reached(2, 3, 7))
    with pytest.raises(RuntimeError, match="ended"):  # as on every other rank
        Board(keys, 1, (0, 1)).look(reached(2, 3, 7), shows=False)
