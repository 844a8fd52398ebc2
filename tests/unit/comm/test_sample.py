"""Samples of tensors on the host, by which writes show that no version counter does."""

from __future__ import annotations

import pytest
import torch

from fsdp2.comm.sample import Sample
from tests.unit.comm.transforms import in_jvp


def test_each_span_is_named() -> None:
    """The bytes between spans belong to nobody, and a span may be empty."""
    buffer = torch.zeros(1000, dtype=torch.uint8)
    spans = {"a": (0, 4), "empty": (4, 0), "b": (8, 300), "c": (308, 600)}
    sample = Sample(buffer, spans)
    earlier = sample.take()
    assert sample.unlike(earlier) == []
    buffer[4:8] = 1
    assert sample.unlike(earlier) == []
    buffer[:4] = 1
    buffer[308:908] = 1
    assert sample.unlike(earlier) == ["a", "c"]
    assert sample.unlike(sample.take()) == []


def test_no_spans() -> None:
    """Of a group whose parameters have extensions, or lack elements on some ranks."""
    sample: Sample[str] = Sample(torch.zeros(4, dtype=torch.uint8), {})
    assert sample.unlike(sample.take()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (1000,), (256, 64), (63, 65), (8, 3, 3, 3)])
@pytest.mark.parametrize("write", ["all of it to one", "a half of the columns", "a half of the rows", "by little"])
def test_a_write_to_most_of_it_shows(dtype, shape, write) -> None:
    """One has no bits in its lower bytes, and a small change has none in the upper ones."""
    torch.manual_seed(0)
    numel = torch.Size(shape).numel()
    values = torch.zeros(numel) if write == "all of it to one" else torch.randn(numel)
    buffer = values.to(dtype).view(torch.uint8).clone()
    sample = Sample(buffer, {"weight": (0, buffer.numel())})
    earlier = sample.take()
    weight = buffer.view(dtype).view(shape)
    if write == "all of it to one":
        weight.fill_(1)
    elif write == "by little":
        buffer.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).add_(1)
    else:
        half = (
            weight
            if weight.numel() == 1
            else weight[..., ::2]
            if "columns" in write
            else weight[: -(-len(weight) // 2)]
        )
        half.copy_(half.float() + 1)
    assert sample.unlike(earlier) == ["weight"]


def test_few_bytes_of_a_large_tensor_are_read() -> None:
    """So that a step takes no longer with larger matrices."""
    assert Sample(torch.zeros(10**6, dtype=torch.uint8), {"weight": (0, 10**6)}).take().numel() <= 65


def test_another_default_device() -> None:
    """``torch.set_default_device`` puts there what names no device."""
    with torch.device("meta"):
        buffer = torch.zeros(8, dtype=torch.uint8, device="cpu")
        sample = Sample(buffer, {"weight": (0, 8)})
        earlier = sample.take()
    buffer.add_(1)
    assert sample.unlike(earlier) == ["weight"]


def test_transforms_and_inference_leave_no_mark() -> None:
    """What is taken inside of them is compared later, outside, inside another one, and inside inference mode."""
    buffer = torch.zeros(400, dtype=torch.uint8)
    sample = Sample(buffer, {"weight": (0, 400)})
    taken: list[torch.Tensor] = []
    take = lambda: taken.append(sample.take())
    in_jvp(lambda: in_jvp(take))
    with torch.inference_mode():
        take()
    in_jvp(take)
    buffer.add_(1)
    found: list[list[str]] = []
    look = lambda: found.extend(sample.unlike(one) for one in taken)
    look()
    in_jvp(look)
    with torch.inference_mode():
        look()
    assert found == [["weight"]] * 9
