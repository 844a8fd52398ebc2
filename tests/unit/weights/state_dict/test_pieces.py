"""Pieces are put together again, however they were cut, or it is said which are missing."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.weights.local_pieces import is_piece, merge_local_state_dicts


def cut(whole: torch.Tensor, dim: int, ranks: int, offset: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return the pieces of ``torch.chunk``, empty ones included."""
    size, chunk = whole.size(dim), -(-whole.size(dim) // ranks)
    pieces = []
    for rank in range(ranks):
        start = min(rank * chunk, size)
        where = tuple(start if d == dim else 0 for d in range(whole.ndim))
        piece = whole.narrow(dim, start, min(chunk, size - start))
        pieces.append({"piece": piece, "shape": tuple(whole.shape), "offset": where})
    return pieces


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_any_cut_is_undone(shape: list[int], data: st.DataObject) -> None:
    whole = torch.rand(shape)
    dim, ranks = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    pieces = data.draw(st.permutations(cut(whole, dim, ranks)))
    merged = merge_local_state_dicts([{"w": piece, "other": 1} for piece in pieces])
    assert torch.equal(merged["w"], whole) and merged["other"] == 1
    if len(pieces[0]["piece"]):
        rest = [{"w": piece} for piece in pieces if piece is not max(pieces, key=lambda p: p["piece"].numel())]
        if rest:
            with pytest.raises(ValueError, match=r"w: the pieces hold \d+ elements, expected the"):
                merge_local_state_dicts(rest)


def test_boxes_and_replicas() -> None:
    whole = torch.rand(4, 6)
    boxes = [{"piece": whole[i : i + 2, j : j + 3], "shape": (4, 6), "offset": (i, j)} for i in (0, 2) for j in (0, 3)]
    assert torch.equal(merge_local_state_dicts([{"w": box} for box in boxes + boxes])["w"], whole)
    scalar = {"piece": torch.tensor(3.0), "shape": (), "offset": ()}
    assert merge_local_state_dicts([{"deep": {"s": scalar}}] * 2)["deep"]["s"] == 3.0


def test_what_a_piece_is() -> None:
    assert is_piece({"piece": torch.ones(1), "shape": (1,), "offset": (0,)})
    assert not is_piece({"piece": 1}) and not is_piece(torch.ones(1)) and not is_piece(None)


Moments = namedtuple("Moments", ["first", "second"])


def test_pieces_in_lists_and_tuples() -> None:
    """An optimizer may keep several tensors of a parameter in a tuple. The merged state had rank 0's pieces there."""
    whole = [torch.rand(5, 2), torch.rand(3)]
    states = [
        {"kinds": [list(pair), tuple(pair), Moments(*pair)], "betas": (0.9, rank), "params": ["w"] * (1 + rank)}
        for rank, pair in enumerate(zip(*(cut(tensor, 0, 2) for tensor in whole), strict=True))
    ]
    merged = merge_local_state_dicts(states)
    assert (merged["betas"], merged["params"]) == ((0.9, 0), ["w"])  # what is in no pieces is the first's
    for pair, kind in zip(merged["kinds"], (list, tuple, Moments), strict=True):
        assert type(pair) is kind and torch.equal(pair[0], whole[0]) and torch.equal(pair[1], whole[1])
    with pytest.raises(ValueError, match="kinds.1: pieces in sequences of different kinds or lengths"):
        merge_local_state_dicts([states[0], {**states[1], "kinds": [states[1]["kinds"][0], (), ()]}])
    for wrong in (3, torch.ones(5, 2), None):
        with pytest.raises(ValueError, match="w: .*in one state dict"):
            merge_local_state_dicts([{"w": wrong}, {"w": cut(whole[0], 0, 2)[1]}])
        with pytest.raises(ValueError, match="w: .*in one state dict"):
            merge_local_state_dicts([{"w": wrong}, {"w": [cut(whole[0], 0, 2)[1]]}])


def test_pieces_of_two_saves() -> None:
    """Pieces of saves on different numbers of ranks were joined if their sizes added up: what no piece covered was
    uninitialised memory."""
    whole = torch.rand(4)
    halves, quarters = cut(whole, 0, 2), cut(whole, 0, 4)
    for mixed in ([halves[0], quarters[1], quarters[3]], [quarters[1], halves[0], quarters[2]]):
        with pytest.raises(ValueError, match="w: pieces that overlap"):
            merge_local_state_dicts([{"w": piece} for piece in mixed])
    merged = merge_local_state_dicts([{"w": piece} for piece in (halves[0], quarters[2], halves[0], quarters[3])])
    assert torch.equal(merged["w"], whole)
