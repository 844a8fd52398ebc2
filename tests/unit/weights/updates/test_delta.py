"""Changes of a part are found by bits, and what is written of them is what was read, in the fewest bytes."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp2.sharding.boxes import narrow, numel
from fsdp2.weights.buckets import Entry
from fsdp2.weights.updates.bucket import Part, Update, WeightBucket, from_plain, to_plain
from fsdp2.weights.updates.delta import Form, bits, changed, counted, decode, encode, nbytes_of, reachable, smallest

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)


@st.composite
def parts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two flat tensors of one dtype, with random bytes, of which any share differs."""
    dtype, numel = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    high = 2 if dtype == torch.bool else 256
    old = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    new = old.clone()
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    at = torch.rand(numel, generator=generator) < share
    other = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    bits(new)[at] = bits(other)[at]
    return new, old


def written(form: Form, new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return ``old`` after the changes have been encoded, decoded and written, and the bytes that they took."""
    count = {Form.WHOLE: len(new), Form.STEPS: int(reachable(mask).sum()), Form.BITS: int(mask.sum())}[form]
    data = torch.empty(nbytes_of(form, count, len(new), new.dtype.itemsize), dtype=torch.uint8)
    encode(form, new, mask, data)
    at, values = decode(form, data, count, len(new), new.dtype)
    result = old.clone()
    if at is None:
        bits(result).copy_(bits(values))
    else:
        assert (at.diff() > 0).all()
        bits(result).put_(at, bits(values))
    return result, len(data)


@given(parts())
@example((torch.tensor([0.0, -0.0, float("nan")]), torch.tensor([-0.0, -0.0, float("nan")])))
def test_every_form_is_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Also NaNs and signs of zeros; the form that is chosen takes no more bytes than another."""
    new, old = pair
    mask = changed(new, old)
    assert mask.tolist() == [a != b for a, b in zip(bits(new).tolist(), bits(old).tolist())]
    sizes = {}
    for form in (Form.WHOLE, Form.STEPS, Form.BITS):
        result, sizes[form] = written(form, new, old, mask)
        assert torch.equal(bits(result), bits(new)), form
    marked, reached = map(int, counted(mask))
    form, _ = smallest(marked, reached, len(new), new.dtype.itemsize)
    assert (form == Form.NOTHING) == (not mask.any())
    assert form == Form.NOTHING or sizes[form] == min(sizes.values())


def test_steps_over_long_stretches() -> None:
    """Between two changes are more elements than 16 bits count: elements in between are sent again."""
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    for places in ([199_999], [0, 65_536], [65_535], [70_000, 70_001, 199_998]):
        new = old.clone()
        new[places] = 1
        mask = changed(new, old)
        marked, reached = map(int, counted(mask))
        form, count = smallest(marked, reached, len(new), 2)
        assert (marked, reached) == (len(places), int(reachable(mask).sum()))
        assert form == Form.STEPS and count == reached <= len(places) + 4
        result, nbytes = written(Form.STEPS, new, old, mask)
        assert torch.equal(result, new) and nbytes <= 4 * (len(places) + 4) + 16


def test_a_part_that_is_one_step_long() -> None:
    """From its first element to its last is a step that 16 bits hold, so nothing is sent again."""
    mask = torch.arange(65_536) == 65_534
    assert torch.equal(reachable(mask[:-1]), mask[:-1]) and [*map(int, counted(mask[:-1]))] == [1, 1]
    assert int(reachable(mask).sum()) == int(counted(mask)[1]) == 3


def test_which_form_is_smallest() -> None:
    """Few changes as steps, more as a bit each, nearly all as a whole."""
    chosen = [smallest(count, count, 10_000, 2)[0] for count in (0, 100, 500, 1_000, 9_000, 9_900)]
    assert chosen == [Form.NOTHING, Form.STEPS, Form.STEPS, Form.BITS, Form.BITS, Form.WHOLE]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """A shape, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((start, draw(st.integers(1, size - start))) for start, size in zip(starts, shape))


@given(boxes(), st.sampled_from([Form.WHOLE, Form.STEPS, Form.BITS]), st.booleans(), st.data())
def test_positions_in_the_whole_tensor(case, form: Form, transposed: bool, data: st.DataObject) -> None:
    """A bucket with changes of a box of a tensor: they are written there and nowhere else, in any memory order, and
    ``changes`` says where in the flattened whole tensor they are."""
    shape, box = case
    before = torch.arange(numel(tuple((0, size) for size in shape)), dtype=torch.float32).view(shape)
    after = before.clone()
    part_before = narrow(before, box).reshape(-1)
    at = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(part_before), max_size=len(part_before))))
    new = torch.where(at, -part_before - 1, part_before)
    narrow(after, box).copy_(new.view([length for _, length in box]))
    count = len(new) if form == Form.WHOLE else int(at.sum())
    buffer = torch.empty(nbytes_of(form, count, len(new), 4), dtype=torch.uint8)
    encode(form, new, at, buffer)
    update = Update("s", 2, 1, True, 1, ("w",), (Entry(shape, torch.float32),))
    bucket = WeightBucket(buffer, (Part(0, box, form, count, 0),), update, 0)
    bucket = WeightBucket.from_metadata(bucket.metadata, buffer)
    target = before.clone()
    if transposed and target.ndim > 1:
        target = target.transpose(0, -1).contiguous().transpose(0, -1)
    bucket.write(bucket.parts[0], target)
    assert torch.equal(target, after)
    ((name, places, values),) = bucket.changes()
    flat = before.flatten().clone()
    flat[places] = values
    assert name == "w" and torch.equal(flat, after.flatten()) and len(places) == count


def test_an_update_in_plain_values() -> None:
    """What a receiver knows already is left out."""
    update = Update("s", 3, 2, True, 4, ("a", "b"), (Entry((2, 3), torch.bfloat16), Entry((), torch.int64)))
    assert from_plain(to_plain(update), None) == update
    assert from_plain(to_plain(update, tensors=False), update) == update
    assert to_plain(update, tensors=False)["tensors"] is None
