"""Boxes: blocks cover a tensor once, in order, and ranks' boxes meet them where they should."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.sharding.boxes import beyond, copy_common, intersect, narrow, numel, whole, within
from fsdp2.weights.buckets import Entry, blocks, buckets

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float64])


@st.composite
def two_boxes(draw):
    """A shape and two boxes in it."""
    shape = draw(SHAPES)
    boxes = []
    for _ in range(2):
        starts = [draw(st.integers(0, size)) for size in shape]
        boxes.append(tuple((start, draw(st.integers(0, size - start))) for start, size in zip(starts, shape)))
    return shape, *boxes


@given(SHAPES, st.integers(1, 40))
def test_blocks_are_the_tensor_in_row_major_order(shape, limit):
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = [narrow(tensor, box) for box in blocks(whole(shape), limit)]
    assert all(0 < part.numel() <= limit and part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts] or [tensor.reshape(-1)]), tensor.reshape(-1))


@given(SHAPES, st.integers(1, 40))
def test_few_blocks_are_enough(shape, limit):
    total = math.prod(shape)
    row = math.prod(shape[1:]) if shape else 1
    if shape and row and row <= limit:
        assert len(list(blocks(whole(shape), limit))) == -(-shape[0] // (limit // row))
    assert total > limit or len(list(blocks(whole(shape), limit))) == (total > 0)


@given(two_boxes())
def test_what_two_boxes_have_in_common(case):
    shape, a, b = case
    both = intersect(a, b)
    cells = [set(itertools.product(*(range(start, start + length) for start, length in box))) for box in (a, b)]
    common = set(itertools.product(*(range(s, s + n) for s, n in both))) if both is not None else set()
    assert common == cells[0] & cells[1] and (both is None or numel(both) == len(common))
    if both is not None:
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        assert torch.equal(narrow(tensor, both), narrow(narrow(tensor, a), within(both, a)))
        assert beyond(within(both, a), a) == both
        target = torch.full([length for _, length in b], -1)
        copy_common(narrow(tensor, a), a, target, b)
        assert set(target.flatten().tolist()) - {-1} == set(narrow(tensor, both).flatten().tolist())


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=5), st.integers(1, 12))
def test_buckets_hold_every_byte_once_and_no_more_than_they_may(tensors, sixteens):
    entries, limit = [Entry(shape, dtype) for shape, dtype in tensors], 16 * sixteens
    seen = [0] * len(entries)
    ended = []
    for parts in buckets(entries, limit):
        end = 0
        for part in parts:
            assert part.offset % 16 == 0 and part.offset >= end
            end = part.offset + part.nbytes
            assert part.nbytes == numel(part.box) * entries[part.index].dtype.itemsize
            seen[part.index] += part.nbytes
            ended += [part.index] * part.last
        assert 0 < end <= limit
    assert seen == [entry.nbytes for entry in entries]
    assert ended == [i for i, entry in enumerate(entries) if entry.nbytes]


@pytest.mark.parametrize("count", [1, 5])
def test_what_fits_travels_at_once(count):
    assert len(list(buckets([Entry((4, 4), torch.float32)] * count, 64 * count))) == 1


def test_a_large_tensor_fills_its_buckets():
    assert [sum(part.nbytes for part in parts) for parts in buckets([Entry((64,), torch.float32)], 64)] == [64] * 4
