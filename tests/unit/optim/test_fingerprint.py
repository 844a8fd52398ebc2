"""Two tensors have one fingerprint if they have the same bits in the same places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    "every second sign": lambda values: values[1::2].neg_(),
    "some of the signs": lambda values: values[3::4].neg_(),
    "a second difference": lambda values: values.view(torch.int32)[4:10:2].add_(torch.tensor([1, -2, 1]).int()),
    "a scale": lambda values: values.mul_(0.5),
    "zeros": lambda values: values.zero_(),
}


@pytest.mark.parametrize(
    ("at_once", "columns", "first"), [(1 << 20, 3, 0), (8, 3, 0), (8, 5, 2), (8, 3, 1), (7, 3, 1), (3, 9, 1)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change, at_once, columns, first, monkeypatch):
    """Whether bits are widened all at once, or summed in a table, or widened in pieces because they begin at an odd
    place; the table may have no rows, and elements may be left over."""
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_SMALL", at_once)
    monkeypatch.setattr(module, "_COLUMNS", columns)
    values = (torch.randn(16 + first, generator=torch.Generator().manual_seed(0)) * 1e4)[first:]
    values[1] = values[2] = 1e-30
    values[3] = 0.0
    same = torch.empty(16 + first)[first:].copy_(values)  # a new tensor would begin at an even place
    before = fingerprint(values)
    assert torch.equal(before, fingerprint(same))
    CHANGES[change](values)
    assert not torch.equal(before, fingerprint(values))


def test_large_tensors_are_not_widened():
    """A temporary tensor of 64 bits for each element took seven times the time of reading."""
    values = torch.randn((1 << 20) + 10)
    with Largest() as largest:
        found = [int(fingerprint(values))]
    assert largest.nbytes <= values.nbytes / 64
    for part in (values[-1:], values[77:78], values[1::2], values[1 << 19 :][1::4], values.view(torch.float64)):
        part.neg_()
        found.append(int(fingerprint(values)))
    assert len({*found}) == len(found) == 6


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes, views left out."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        addresses = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in addresses:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("columns", [3, 7])
def test_two_bits_of_one_word_show(columns, monkeypatch):
    """The same bit of two neighbours hid in one of eight cases when halves were mixed without another step before."""
    monkeypatch.setattr(module, "_SMALL", 8)
    monkeypatch.setattr(module, "_COLUMNS", columns)
    values = torch.randn(64, generator=torch.Generator().manual_seed(1))
    before, bits = fingerprint(values), values.view(torch.int32)
    for place in range(63):
        for bit in range(32):
            flip = -(1 << 31) if bit == 31 else 1 << bit
            bits[place : place + 2] ^= flip
            assert not torch.equal(before, fingerprint(values)), (place, bit)
            bits[place : place + 2] ^= flip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_of_gradients(dtype):
    """And layouts: the same values in another memory order are the same."""
    values = torch.randn(6, 4).to(dtype)
    assert torch.equal(fingerprint(values), fingerprint(values.t().contiguous().t()))
    other = values.clone()
    other[3, 2] = 7.0
    assert not torch.equal(fingerprint(values), fingerprint(other))
    assert fingerprint(values[:0]).item() == 0


@pytest.mark.parametrize("small", [1 << 16, 8])
def test_the_sign_of_each_double_shows(small, monkeypatch):
    """It is the highest bit of a sum of 64 bits, which an even weight would lose."""
    monkeypatch.setattr(module, "_SMALL", small)
    monkeypatch.setattr(module, "_COLUMNS", 7)
    values = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = fingerprint(values)
    for place in range(64):
        values[place].neg_()
        assert not torch.equal(before, fingerprint(values)), place
        values[place].neg_()


@pytest.mark.parametrize("other", [1, 7], ids=["of one row", "of one column"])
def test_words_of_a_table_that_change_places_show(other, monkeypatch):
    """Sums of rows alone, or of columns alone, would stay as they are."""
    monkeypatch.setattr(module, "_SMALL", 8)
    monkeypatch.setattr(module, "_COLUMNS", 7)
    words = torch.randn(64, generator=torch.Generator().manual_seed(1)).view(torch.int64)
    before = fingerprint(words.view(torch.float32))
    words[[0, other]] = words[[other, 0]]
    assert not torch.equal(before, fingerprint(words.view(torch.float32)))
