"""What ranks compare before their first pass, in words."""

from __future__ import annotations

import pytest

from fsdp2.ranks.start import _other_values


@pytest.mark.parametrize(("others", "text"), [(8, "ranks 1, 2, 3, 4, 5, 6, 7, 8 started"), (9, "7, 8, ... started")])
def test_eight_ranks_with_other_values_are_named(others: int, text: str) -> None:
    values = {rank: [("0.weight", [float(rank > 0)])] for rank in range(others + 1)}
    assert text in (_other_values(values) or "")
