"""Scaling against plain arithmetic: whatever the path, the sum of all ranks ends up divided by the factor."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp2.comm.scaling import Scaling, choose_scaling

WIDE = (torch.float32, torch.bfloat16, torch.float64)

axes = st.integers(1, 64)
factors = st.none() | st.integers(1, 10_000) | st.floats(2.0**-10, 2.0**20)


def reduced(values: list[list[Fraction]], scaling: Scaling) -> Fraction:
    """Return what the collectives make of ``values[replica][shard rank]``."""
    total = Fraction(0)
    for replica in values:
        part = sum(value / Fraction(scaling.pre) for value in replica)
        total += part / len(replica) if scaling.average else part
    total = total / len(values) if scaling.average else total
    return total / Fraction(scaling.post)


@given(st.sampled_from([*WIDE, torch.float16]), st.integers(1, 6), st.integers(1, 4), factors, st.booleans(), st.data())
def test_the_result_is_the_sum_divided_by_the_factor(
    dtype: torch.dtype, shard: int, replicate: int, factor: float | None, force_sum: bool, data: st.DataObject
) -> None:
    row = st.lists(st.integers(-1000, 1000).map(Fraction), min_size=shard, max_size=shard)
    values = data.draw(st.lists(row, min_size=replicate, max_size=replicate))
    scaling = choose_scaling(dtype, shard, replicate, factor=factor, force_sum=force_sum)
    divisor = Fraction(shard * replicate if factor is None else float(factor))
    exact = sum(map(sum, values)) / divisor
    assert abs(reduced(values, scaling) - exact) <= abs(exact) * Fraction(2) ** -52


@given(st.sampled_from(WIDE), axes, axes)
def test_a_wide_range_lets_the_backend_average(dtype: torch.dtype, shard: int, replicate: int) -> None:
    world = shard * replicate
    expected = Scaling(average=True) if world > 1 else Scaling()
    assert choose_scaling(dtype, shard, replicate) == expected
    assert choose_scaling(dtype, shard, replicate, factor=world) == expected


@given(st.sampled_from([*WIDE, torch.float16]), axes, axes, factors)
def test_forced_sums_never_average(dtype: torch.dtype, shard: int, replicate: int, factor: float | None) -> None:
    scaling = choose_scaling(dtype, shard, replicate, factor=factor, force_sum=True)
    assert not scaling.average
    assert scaling.divisor == pytest.approx(shard * replicate if factor is None else factor)


@given(st.sampled_from(WIDE), axes, axes, st.floats(2.0**-10, 2.0**20))
def test_a_factor_of_ones_own_divides_once_after_the_sum(
    dtype: torch.dtype, shard: int, replicate: int, factor: float
) -> None:
    scaling = choose_scaling(dtype, shard, replicate, factor=factor)
    assert scaling == (Scaling(post=factor) if factor != shard * replicate else choose_scaling(dtype, shard, replicate))


@example(1024)
@given(st.integers(1, 1 << 14))
def test_half_precision_divides_by_about_the_root_before_and_the_rest_after(world: int) -> None:
    scaling = choose_scaling(torch.float16, world, 1)
    assert not scaling.average
    assert scaling.pre * scaling.post == world
    assert scaling.pre == 2.0 ** (int(scaling.pre).bit_length() - 1)  # exact in every binary format
    assert scaling.pre <= max(2 * world**0.5, 1)
    if world & (world - 1) == 0:
        assert world**0.5 <= scaling.pre


@pytest.mark.parametrize(
    ("world", "pre", "post"), [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (6, 4, 1.5), (8, 4, 2), (16, 4, 4)]
)
def test_half_precision_factors_of_small_worlds(world: int, pre: float, post: float) -> None:
    assert choose_scaling(torch.float16, world, 1) == Scaling(pre=pre, post=post)
    assert choose_scaling(torch.float16, 1, world) == Scaling(pre=pre, post=post)


def test_a_half_precision_factor_below_one_multiplies_after_the_sum() -> None:
    assert choose_scaling(torch.float16, 8, 1, factor=0.5) == Scaling(pre=1.0, post=0.5)
