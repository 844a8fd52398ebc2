"""Which parameters are encoded, and what ranks compare of that."""

from __future__ import annotations

import pytest
import torch

from fsdp2 import CompressionPolicy
from fsdp2.compression.collectives import compress
from fsdp2.engine.formats import Formats, choose_formats, digest
from fsdp2.sharding.layout import ShardLayout

POLICY = CompressionPolicy(torch.int8, torch.int8, torch.int8, block=528, min_numel=1)


def formats(numel: int, policy: CompressionPolicy = POLICY) -> Formats:
    """Return the formats of a parameter of two pieces, each of so many elements."""
    return choose_formats(compress(policy), "weight", None, ShardLayout((2 * numel,), (1,), 0, 2))


@pytest.mark.parametrize(("numel", "encoded"), [(528, True), (512, True), (511, False)])
def test_one_part_in_thirty_two_may_be_padding(numel: int, encoded: bool) -> None:
    assert (formats(numel) != Formats()) == encoded


@pytest.mark.parametrize(("min_numel", "encoded"), [(1056, True), (1057, False)])
def test_the_smallest_parameter_that_is_encoded(min_numel: int, encoded: bool) -> None:
    policy = CompressionPolicy(torch.int8, block=528, min_numel=min_numel)
    assert (formats(528, policy) != Formats()) == encoded


@pytest.mark.parametrize("skipped", ["weight", "bias"])
def test_what_the_user_skips_is_not_encoded(skipped: str) -> None:
    policy = CompressionPolicy(torch.int8, block=528, min_numel=1, skip=lambda name, param: name == skipped)
    assert (formats(528, policy) == Formats()) == (skipped == "weight")


def test_ranks_compare_formats_where_there_are_any() -> None:
    """By a number, which is another for other parameters."""
    plain, encoded = ("bias", Formats()), ("weight", formats(528))
    assert digest([plain]) == () and len(digest([plain, encoded])) == 1
    assert digest([plain, encoded]) != digest([plain, ("other", formats(528))])
