"""The walk over the nodes that a module made: it finds what backward leads to, sees each node once, and ends."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fsdp2._torch.autograd import node_sequence_number
from fsdp2.autograd import reach
from fsdp2.autograd.reach import Targets


def made_before() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a leaf and a result, and the number of the first node that a module makes after them."""
    leaf = torch.ones(2, requires_grad=True)
    result = torch.ones(2, requires_grad=True) * 2
    marker = torch.ones(1, requires_grad=True) * 1
    return leaf, result, node_sequence_number(marker.grad_fn) + 1


@pytest.mark.parametrize("kind", ["leaf", "result"])
def test_what_backward_leads_to_is_found(kind: str) -> None:
    """Constants among the inputs have no node."""
    leaf, result, since = made_before()
    wanted, other = (leaf, result) if kind == "leaf" else (result, leaf)
    targets = Targets([wanted])
    assert targets.reached_from([torch.zeros(2), (wanted * 3 + torch.ones(2)).exp()], since)
    assert not targets.reached_from([(other * 3).exp()], since)
    assert not targets.reached_from([torch.zeros(2)], since)


def test_a_node_with_several_ways_to_it_is_seen_once() -> None:
    """Each sum has two ways to the one before it: 2 to the power of 40 in all."""
    leaf, result, since = made_before()
    output = leaf
    for _ in range(40):
        output = output + output
    with mock.patch.object(reach, "node_sequence_number", wraps=node_sequence_number) as asked:
        assert not Targets([result]).reached_from([output], since)
    assert asked.call_count <= 41
