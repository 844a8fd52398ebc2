"""Norms of plain tensors in one process: arguments, accuracy, and tensors joined and split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2 import clip_grad_norm_
from fsdp2.optim.runs import joined, split_for_norms


def parameter(grad: torch.Tensor | None) -> nn.Parameter:
    """Return a parameter with this gradient."""
    made = nn.Parameter(torch.zeros(3) if grad is None else torch.zeros_like(grad))
    made.grad = grad
    return made


# ---- arguments ----


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1, 2, 2.5, "inf"])
def test_plain_parameters_are_clipped_like_torchs(norm_type: float, foreach: bool | None) -> None:
    grads = [torch.arange(6.0), torch.ones(2, 3) * -4, torch.zeros(0), torch.tensor(2.0), None]
    mine, theirs = ([parameter(None if g is None else g.clone()) for g in grads] for _ in range(2))
    total = clip_grad_norm_((p for p in mine), 1.5, norm_type, foreach=foreach)
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(theirs[:2] + theirs[3:], 1.5, float(norm_type)))
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None and other.grad is None) or torch.allclose(one.grad, other.grad)


def test_a_single_tensor_and_nothing_at_all() -> None:
    one = parameter(torch.full((4,), 2.0))
    assert clip_grad_norm_(one, 1.0).item() == 4.0
    assert one.grad is not None and one.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    for nothing in ([], iter([]), [parameter(None)], [parameter(torch.zeros(0))]):
        for norm_type in (2.0, float("inf")):
            total = clip_grad_norm_(nothing, 1.0, norm_type, error_if_nonfinite=True)
            assert torch.equal(total, torch.tensor(0.0))


@pytest.mark.parametrize("norm_type", [0, -1, float("-inf"), float("nan")])
def test_orders_that_are_no_norms(norm_type: float) -> None:
    with pytest.raises(ValueError, match=r"clip_grad_norm_: norm_type must be a positive number or inf"):
        clip_grad_norm_([parameter(torch.ones(2))], 1.0, norm_type)


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"parameters must be tensors, got tuple at index 1"):
        clip_grad_norm_([parameter(None), ("name", parameter(None))], 1.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_norms_of_many_elements_are_exact(norm_type: float) -> None:
    grad = torch.rand(3_000_000, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).item()
    assert clip_grad_norm_([parameter(grad)], 1e9, norm_type).item() == pytest.approx(exact, rel=1e-5)


# ---- runs ----


def test_neighbours_in_memory_become_one() -> None:
    base = torch.arange(20.0)
    parts = [base[:4], base[4:10].view(2, 3), base[10:11], base[12:16], base[16:20].view(2, 2).t()]
    made = joined(parts)
    assert [tensor.tolist() for tensor in made[:2]] == [list(map(float, range(11))), [12.0, 13.0, 14.0, 15.0]]
    assert made[2] is parts[4] and len(made) == 3
    made[0].zero_()
    assert base[:12].tolist() == [0.0] * 11 + [11.0]


def test_what_cannot_be_one_stays() -> None:
    big = torch.zeros(3 << 15)
    halves = [big[: 1 << 15], big[1 << 15 : 2 << 15], big[2 << 15 :]]
    assert [tensor.numel() for tensor in joined(halves)] == [2 << 15, 1 << 15]
    separate = [torch.ones(8) for _ in range(50)]
    assert sum(tensor.sum().item() for tensor in joined(separate)) == 400
    same = torch.ones(4)
    assert joined([same, same]) == [same, same] or len(joined([same, same])) == 2
    assert joined([]) == []


def test_large_tensors_are_split_for_norms() -> None:
    big, small = torch.zeros(5, 1 << 14), torch.ones(3)
    pieces = split_for_norms([big, small])
    assert [tensor.numel() for tensor in pieces] == [1 << 16, 1 << 14, 3]
    turned = torch.zeros(1 << 14, 5).t()
    assert split_for_norms([turned])[0] is turned
