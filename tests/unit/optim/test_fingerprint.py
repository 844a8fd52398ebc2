"""Two tensors have one fingerprint if they have the same bits in the same places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp2.optim.whole import fingerprint as module
from fsdp2.optim.whole.fingerprint import fingerprint
from tests.support import api

pytestmark = api.fsdp2_only


def small_signs(values: Tensor) -> None:
    """Change the signs of two elements that no sum of floats would show."""
    values[1] = values[2] = -1e-30


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one bit": lambda values: values.view(torch.int32)[5].bitwise_xor_(1),
    "two small signs": small_signs,
    "all signs": lambda values: values.neg_(),
    "the sign of a zero": lambda values: values[3].neg_(),
    "two places": lambda values: values[:2].copy_(values[:2].flip(0)),
    "far places": lambda values: values.copy_(values.roll(8)),
    "a scale": lambda values: values.mul_(0.5),
    "zeros": lambda values: values.zero_(),
}


@pytest.mark.parametrize("at_once", [1 << 20, 8, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change, at_once, monkeypatch):
    """Whether bits are widened all at once or in pieces."""
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    values = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 1e4
    values[1] = values[2] = 1e-30
    values[3] = 0.0
    before, same = fingerprint(values), fingerprint(values.clone())
    assert torch.equal(before, same)
    CHANGES[change](values)
    assert not torch.equal(before, fingerprint(values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_of_gradients(dtype):
    """And layouts: the same values in another memory order are the same."""
    values = torch.randn(6, 4).to(dtype)
    assert torch.equal(fingerprint(values), fingerprint(values.t().contiguous().t()))
    other = values.clone()
    other[3, 2] = 7.0
    assert not torch.equal(fingerprint(values), fingerprint(other))
    assert fingerprint(values[:0]).item() == 0


def test_random_changes_of_two_bits_show():
    """Of twenty thousand pairs of bits none hides another."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, generator=generator)
    before = fingerprint(values)
    bits = values.view(torch.int32)
    for _ in range(20000):
        (first, second), (low, high) = torch.randint(64, (2,), generator=generator), torch.randint(32, (2,))
        flips = [(int(first), int(low)), (int(second), int(high))]
        if flips[0] == flips[1]:
            continue
        for place, bit in flips:
            bits[place] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert not torch.equal(before, fingerprint(values)), flips
        for place, bit in flips:
            bits[place] ^= -(1 << 31) if bit == 31 else 1 << bit
