"""Pairs of tensors that have the same values in a few places, as a device sees it."""

from __future__ import annotations

import pytest
import torch

from fsdp2.comm.comparison import Comparison
from tests.unit.comm.transforms import in_jvp

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128)
CASTS = [(dtype, dtype) for dtype in DTYPES] + [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)]


def unlike(comparison: Comparison[str]) -> list[str]:
    """Return the names of what differs."""
    found = []
    for counts, differ in comparison.on_device():
        results = differ.split([count for _, count in counts])
        found += [name for (name, _), result in zip(counts, results) if result.any()]
    return found


@pytest.mark.parametrize(("dtype", "to"), CASTS)
@pytest.mark.parametrize("shape", [(6, 4), (3, 5), (2, 1), ()])
@pytest.mark.parametrize("how", ["dense", "transposed", "from the second element on"])
def test_alike_in_the_dtype_of_the_first(dtype, to, shape, how) -> None:
    """Pieces of full parameters begin anywhere in memory, and shards at the beginning of theirs."""
    torch.manual_seed(0)
    other = torch.randn(shape).to(dtype)
    other = other.t() if how == "transposed" and other.dim() == 2 else other
    changed, missing = other.clone(), other.clone()
    changed[(-1,) * other.dim()] = 9  # within the few elements, as the tensors are small
    missing[(0,) * other.dim()] = float("nan")
    for one in (other, missing):
        mine, shard = one.clone().to(to), one.clone()
        if how == "from the second element on":
            mine = torch.empty(mine.numel() + 1, dtype=to)[1:].view(shape).copy_(mine)
        comparison = Comparison({"a pair": (mine, shard)})
        assert not unlike(comparison)
        shard.copy_(changed)
        assert unlike(comparison) == ["a pair"]
    assert unlike(Comparison({"a pair": (other.clone().to(to), missing)}))


def test_each_pair_is_named() -> None:
    """Pairs of several dtypes and shapes; a device compares those of the same dtypes together."""
    pairs = {}
    for name, dtype in {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "d": torch.bfloat16}.items():
        pairs[name] = torch.zeros(300, 7, dtype=dtype), torch.zeros(300, 7)
    comparison = Comparison(pairs)
    assert not unlike(comparison)
    for name in ("b", "c"):
        pairs[name][1].add_(1e-3)
    assert sorted(unlike(comparison)) == ["b", "c"]
    assert len(comparison.on_device()) == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_few_elements_of_a_large_tensor_are_compared(transposed) -> None:
    """So that a step takes no longer with larger matrices. What changes most elements is found."""
    one, other = torch.zeros(1000, 300, 3, 3), torch.zeros(1000, 300, 3, 3)
    if transposed:
        one, other = one.transpose(0, 1), other.transpose(0, 1)
    comparison = Comparison({"a pair": (one, other)})
    assert not unlike(comparison)
    elements = sum(count for counts, _ in comparison.on_device() for _, count in counts)
    assert elements == (8 * 8 * 3 * 3 if transposed else 8 * 8)
    other.add_(1e-6)
    assert unlike(comparison)


def test_a_device_compares_nothing_on_the_host() -> None:
    """The device may be writing there, behind what the host does now."""
    pairs = {"on the host": (torch.empty(4, device="meta"), torch.zeros(4)), "here": (torch.ones(4), torch.zeros(4))}
    assert unlike(Comparison(pairs)) == ["here"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_a_device_compares_inside_autocast(dtype) -> None:
    """Which refuses to join floats of another half precision: a model of them raised in its second forward."""
    pairs = {name: (torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)) for name in "ab"}
    pairs["b"][1].fill_(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert unlike(Comparison(pairs)) == ["b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transforms_leave_no_mark(dtype) -> None:
    """What the first forward inside two transforms had made was theirs: a later one inside one raised "escaped?"."""
    full, shard = torch.zeros(4, dtype=dtype), torch.zeros(4)
    comparison = Comparison({"a pair": (full, shard)})
    found: list[bool] = []
    look = lambda: found.append(bool(unlike(comparison)))
    in_jvp(lambda: in_jvp(look))
    shard.add_(1)
    in_jvp(look)
    look()
    assert found == [False, True, True]
