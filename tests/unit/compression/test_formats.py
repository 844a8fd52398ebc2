"""Block formats: exact where values are representable, within half a step of their block elsewhere, unbiased sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fsdp2.compression import formats
from fsdp2.compression.formats import BlockFormat, Noise, _pieces, decode, decode_sum, encode, encoded_views

BLOCK = 32
INTEGERS = {torch.int8: 127, "int4": 7}
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = (*INTEGERS, *FLOATS)


def coded(values: Tensor, form: BlockFormat, draw=None) -> tuple[Tensor, Tensor]:
    """Return the bytes that ``values`` (rows, elements) become, and what they decode to."""
    rows, numel = values.shape
    sent = torch.zeros(rows, form.nbytes(numel), dtype=torch.uint8)
    encode(values, encoded_views(sent, numel, form), form, draw)
    out = torch.full((rows, numel), 7.0)
    decode(encoded_views(sent, numel, form), out, form)
    return sent, out


def steps(values: Tensor, kind: torch.dtype | str) -> Tensor:
    """The distance between neighbouring numbers of the format at each value, given its block."""
    blocks = values.double().unflatten(1, (-1, BLOCK))
    peak = blocks.abs().amax(-1, keepdim=True)
    if kind in INTEGERS:
        step = (peak / INTEGERS[kind]).expand_as(blocks)
    else:
        info = torch.finfo(kind)
        scale = peak / info.max
        exponent = torch.floor(torch.log2((blocks / scale).abs().clamp_min(info.smallest_normal)))
        step = scale * torch.exp2(exponent) * info.eps
    return step.flatten(1)


def random_values(rows: int = 3, blocks: int = 8) -> Tensor:
    """Values whose blocks have sizes of their own."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, blocks, BLOCK, generator=generator)
    return (values * torch.logspace(-9, 9, blocks).unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_at_most_half_a_step_of_the_block(kind: torch.dtype | str, dtype: torch.dtype) -> None:
    values = random_values().to(dtype)
    _, out = coded(values, BlockFormat(kind, BLOCK))
    error = (out.double() - values.double()).abs()
    assert (error <= (0.5 + 1e-4) * steps(values, kind)).all()
    assert error.max() > 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_half_a_step_holds_while_the_scale_is_a_normal_number(kind: torch.dtype | str) -> None:
    """docs/compression.md names the smallest block that it holds for. Below, the scale has fewer digits than a float32
    usually has: at 1e-40 no element keeps more than a few."""
    values = random_values(blocks=1)
    peak = values.abs().amax(1, keepdim=True)
    for largest, holds in ((1e-33, True), (1e-40, False)):
        small = values / peak * largest
        _, out = coded(small, BlockFormat(kind, BLOCK))
        error = (out.double() - small.double()).abs()
        assert bool((error <= (0.5 + 1e-4) * steps(small, kind)).all()) == holds


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("by_chance", [False, True])
def test_what_the_format_can_represent_arrives_as_it_is(kind: torch.dtype | str, by_chance: bool) -> None:
    if kind in INTEGERS:
        largest = INTEGERS[kind]
        numbers = torch.arange(-largest, largest + 1).repeat(BLOCK)[: 8 * BLOCK].float()
    else:
        largest = torch.finfo(kind).max
        numbers = torch.arange(256, dtype=torch.uint8).view(kind).float()
        numbers = numbers.where(numbers.isfinite(), torch.zeros(()))
    blocks = numbers.view(-1, BLOCK).clone()
    blocks[:, 0] = largest
    values = (blocks * 2.0 ** torch.arange(-4, 4).unsqueeze(-1)).view(2, -1)
    _, out = coded(values, BlockFormat(kind, BLOCK), Noise(1) if by_chance else None)
    assert torch.equal(out, values)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("drawn", [-0.5 + 2.0**-15, 0.5 - 2.0**-15])
def test_no_drawn_number_moves_what_the_format_has(kind: torch.dtype | str, drawn: float) -> None:
    """Whatever the scale, its multiples stay, the largest too, which may not become one beyond the format."""
    form, generator = BlockFormat(kind, BLOCK), torch.Generator().manual_seed(7)
    largest = INTEGERS[kind] if kind in INTEGERS else torch.finfo(kind).max
    numbers = torch.randint(-7, 8, (4096, BLOCK), generator=generator).float()
    numbers[:, 0], numbers[:, 1] = largest, -largest
    if kind == torch.int8:
        numbers[:, 2:9] *= 18
    values = numbers * torch.exp2(10 * torch.randn(4096, 1, generator=generator))
    _, out = coded(values, form, lambda like: torch.full_like(like, drawn))
    assert ((out - values).abs() <= 1e-5 * values.abs()).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_smallest_numbers_of_float32_become_zero_at_most(kind: torch.dtype | str) -> None:
    values = torch.full((1, BLOCK), 1e-40)
    _, out = coded(values, BlockFormat(kind, BLOCK), Noise(1))
    assert ((out - values).abs() <= torch.finfo(torch.float32).tiny).all()


def test_zeros_stay_zeros() -> None:
    for kind in KINDS:
        assert torch.equal(coded(torch.zeros(1, 2 * BLOCK), BlockFormat(kind, BLOCK), Noise(1))[1], torch.zeros(1, 64))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_block_alone(kind: torch.dtype | str, bad: float) -> None:
    values = torch.ones(1, 3 * BLOCK)
    values[0, BLOCK + 5] = bad
    _, out = coded(values, BlockFormat(kind, BLOCK), Noise(1))
    assert not out[0, BLOCK : 2 * BLOCK].isfinite().any()
    assert torch.equal(out[0, :BLOCK], values[0, :BLOCK]) and torch.equal(out[0, 2 * BLOCK :], values[0, 2 * BLOCK :])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding_by_chance_goes_up_as_often_as_the_value_is_far(kind: torch.dtype | str) -> None:
    """Over all random numbers there are, the mean is the value: exactly, given the numbers."""
    values = random_values(1, 4)
    draws = [(torch.tensor(2 * i - 63) / 128.0) for i in range(64)]
    form = BlockFormat(kind, BLOCK)
    outs = torch.stack([coded(values, form, lambda like, u=u: u.expand(like.shape))[1] for u in draws]).double()
    step = steps(values, kind)
    # 64 numbers stand for an interval each: the mean is within half of one of them of the value.
    assert ((outs.mean(0) - values.double()).abs() <= step * (1 / 128 + 1e-4)).all()
    assert ((outs - values.double()).abs() <= step * 1.0001 * (2 if kind in FLOATS else 1)).all()
    assert len(outs[:, 0, 1].unique()) == 2


def test_noise_is_uniform_and_differs() -> None:
    noise, like = Noise(1), torch.empty(1 << 16)
    first, second, other = noise(like), noise(like), Noise(2)(like)
    for drawn in (first, second, other):
        assert drawn.abs().max() < 0.5
        assert ((drawn * 2**15) % 2 == 1).all()
        counts = torch.histc(drawn, 16, -0.5, 0.5)
        assert ((counts - 4096).abs() < 6 * 64).all()  # six standard deviations
    for a, b in ((first, second), (first, other), (first[1:], first[:-1])):
        both = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert both.abs() < 6 / 256


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("piece", [None, BLOCK], ids=["at once", "row by row"])
def test_sums_of_rows(kind: torch.dtype | str, piece: int | None, monkeypatch) -> None:
    monkeypatch.setattr(formats, "_CPU_PIECE", piece or formats._CPU_PIECE)
    values, form = random_values(), BlockFormat(kind, BLOCK)
    sent, out = coded(values, form)
    for rows, divisor in ((3, 1), (3, 4), (1, 2)):
        total = values[1].clone()
        decode_sum(encoded_views(sent[:rows], values.shape[1], form), total, form, divisor)
        expected = (values[1] + out[:rows].sum(0)) / divisor
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-6 * expected.abs().max() if piece else 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fewer_elements_than_whole_blocks_are_decoded_to_where_they_belong(kind: torch.dtype | str, dtype) -> None:
    values, form = random_values(), BlockFormat(kind, BLOCK)
    sent, out = coded(values, form)
    for numel in (1, BLOCK, 2 * BLOCK + 3):
        full = torch.zeros(3, numel + 5, dtype=dtype)
        decode(encoded_views(sent, values.shape[1], form), full[:, :numel], form)
        assert torch.equal(full[:, :numel], out[:, :numel].to(dtype)) and not full[:, numel:].any()


def test_a_rank_may_have_nothing_behind_the_last_block() -> None:
    values, form = random_values(), BlockFormat(torch.int8, BLOCK)
    sent, _ = coded(values, form)
    form.decode(sent, values.shape[1], nothing := torch.empty(3, 0), first=values.shape[1])
    assert not nothing.numel()


@pytest.mark.parametrize("numel", [64, formats._CPU_PIECE])
def test_noise_reads_its_table_to_the_end(numel: int, monkeypatch) -> None:
    """Also for the largest piece that is rounded at once."""
    noise = Noise(1)
    monkeypatch.setattr(noise._offsets, "randrange", lambda stop: stop - 1)
    assert torch.equal(noise(torch.empty(numel)), noise._table[-numel:])


def test_noise_makes_new_tables() -> None:
    """Each is read so often, and then another one is made, by the same generators."""
    noise, like, tables = Noise(1), torch.empty(64), []
    for _ in range(2):
        for _ in range(formats._READS):
            noise(like)
        tables.append(noise._table)
    assert not torch.equal(*tables)


def test_noise_for_more_than_the_table_has() -> None:
    """Pieces of a device are larger than what a table for a CPU has."""
    assert len(Noise(1)(torch.empty(2 * formats._CPU_PIECE + 1)).unique()) == 1 << 14


def test_tensors_without_memory_are_done_in_pieces_of_a_device() -> None:
    """Those of a forecast say that they are on a CPU, and stand for a device, where each piece is a launch."""
    real = torch.empty(1, 4, formats._CPU_PIECE)
    with FakeTensorMode():
        fake = torch.empty(real.shape)
    assert len([*_pieces(fake)]) == 1 and len([*_pieces(real)]) == 4


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_large_tensors_are_done_in_pieces_of_the_same_bits(kind: torch.dtype | str, monkeypatch) -> None:
    values, form = random_values(3, 8), BlockFormat(kind, BLOCK)
    sent, out = coded(values, form)
    monkeypatch.setattr("fsdp2.compression.formats._CPU_PIECE", 200)
    again, there = coded(values, form)
    assert torch.equal(sent, again) and torch.equal(out, there)
    assert len([*_pieces(torch.empty(8, 1, 25))]) == 1  # no more than fill a cache


def test_bytes() -> None:
    for kind, ideal in ((torch.int8, 4096), ("int4", 2048), (torch.float8_e5m2, 4096)):
        form = BlockFormat(kind, 256)
        assert form.nbytes(4096) == ideal + 4 * 16 <= 1.05 * ideal
        assert form.nbytes(256) % 16 == 0
