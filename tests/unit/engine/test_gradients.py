"""Which chunk of a group's gradients leaves when, on a mesh whose collectives move nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.comm.reduce import ReducePlan
from fsdp2.engine import gradients
from tests.support.counting import events
from tests.support.nccl import too_with_nccl
from tests.support.parity import shard_each

pytestmark = too_with_nccl


class Branch(nn.Module):
    """Two units; the second's result may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        hidden = self.trunk(x)
        branched = self.branch(hidden)
        return branched if use else hidden


def backward_events(model: nn.Module, *args: object, requires_grad: bool = True) -> list[tuple[str, str]]:
    """Return what happens in a backward, without gathers."""
    output = model(torch.ones(2, 4, requires_grad=requires_grad), *args)
    heard = events(output.sum().backward)
    return [event for event in heard if event[0] in ("pre_backward", "post_backward", "reduce", "root_post_backward")]


def test_large_gradients_leave_while_backward_is_still_inside(mesh: DeviceMesh) -> None:
    """Those that are packed for their reduction: on streams others are sent from where they lie, in one launch."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), mesh=mesh, mp_policy=policy)
    model.set_transfer_sizes(chunk_bytes=1)
    seen = [event for event, _ in backward_events(model)]
    assert "reduce" in seen[seen.index("pre_backward") : seen.index("post_backward")]
    assert seen[-1] == "root_post_backward"


def test_small_gradients_leave_together_at_the_end(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), mesh=mesh)
    seen = [event for event, _ in backward_events(model)]
    assert seen == ["pre_backward", "post_backward", "reduce", "root_post_backward"]


def test_a_unit_streams_where_the_largest_one_is_just_worth_two_chunks(mesh: DeviceMesh) -> None:
    """On streams only the memory of the largest counts: 8 bytes in the sum for 4 of weights, for four ranks' chunks."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    four = lambda width: nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(4, width), (width, 4)] * 2))
    model = nn.Sequential(four(192), four(192), four(256))
    shard_each(model, fsdp2, mesh=mesh, mp_policy=policy)
    model.set_transfer_sizes(chunk_bytes=1024 * 4 * 8 // 16)
    for name in "012":
        events = [event for event, unit in backward_events(model) if unit == name]
        assert events[:2] == ["pre_backward", "reduce"]


def test_units_reduce_in_the_order_of_backward(mesh: DeviceMesh) -> None:
    model = Branch()
    shard_each(model, fsdp2, mesh=mesh)
    reduced = [name for event, name in backward_events(model) if event == "reduce"]
    assert reduced == ["branch", "trunk"]


def test_without_inputs_that_need_gradients_the_last_parameter_ends_the_unit(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_each(model, fsdp2, mesh=mesh)
    seen = backward_events(model, requires_grad=False)
    assert [event for event, name in seen if name == "0"] == ["pre_backward", "post_backward", "reduce"]
    assert seen[-1] == ("root_post_backward", "")


def test_a_unit_without_gradients_reduces_nothing(mesh: DeviceMesh) -> None:
    model = Branch()
    shard_each(model, fsdp2, mesh=mesh)
    for _ in range(2):
        assert [name for event, name in backward_events(model, False) if event == "reduce"] == ["trunk"]


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_unit_without_gradients_reduces_zeros_if_asked_to(mesh: DeviceMesh, earlier: int) -> None:
    """Other ranks may have used it: they wait for this one."""
    model = Branch()
    shard_each(model, fsdp2, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(earlier):
        backward_events(model)
    reduced = [name for event, name in backward_events(model, False) if event == "reduce"]
    assert sorted(reduced) == ["branch", "trunk"]


class Scales(nn.Module):
    """Its forward makes one node for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def test_a_forward_with_as_many_nodes_as_weights_computes_beside_its_chunks(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a compiled block makes fewer, and all its gradients at once."""
    sent: list[str] = []
    reduce = gradients.reduce_chunk
    monkeypatch.setattr(
        gradients, "reduce_chunk", lambda *a, **named: sent.append(named["finished"]) or reduce(*a, **named)
    )
    backward_events(fully_shard(Scales(), mesh=mesh), requires_grad=False)
    assert sent == ["early"]


def test_the_nodes_of_all_members_of_a_grouped_call_count(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the last member counted, so that a norm and a head counted as a compiled block.

    Also in a thread that has made no node before, where the first one has the number 0.
    """
    counted: list[int] = []
    monkeypatch.setattr(gradients.GroupGradients, "expect_from", lambda group, nodes: counted.append(nodes))
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    thread = threading.Thread(target=model, args=(torch.ones(2, 4),))
    thread.start()
    thread.join()
    grouped, whole = counted
    assert grouped == whole


def test_an_evaluation_that_passes_its_input_on_is_not_in_its_backward(mesh: DeviceMesh) -> None:
    """The input was computed with gradients, which are not gradients of the unit."""
    unit = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
    unit.forward = lambda x: x
    x = torch.ones(4, requires_grad=True) * 2
    with torch.no_grad():
        output = unit(x)
    assert not events(output.sum().backward)


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_parameter_without_a_gradient_has_none_afterwards(mesh: DeviceMesh) -> None:
    """The others of its chunk are reduced without it."""
    model = fully_shard(Half(), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    assert model.used.weight.grad is not None and model.unused.weight.grad is None


def test_earlier_sums_are_added_as_if_they_were_divided_alike(mesh: DeviceMesh) -> None:
    """They wait for their all-reduce, and the divisor was changed meanwhile."""
    (group,) = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)._get_fsdp_state().groups
    group.gradients.unreduced.sums[group.params[0]] = torch.ones(3), 2.0
    piece, plan = torch.ones(3), cast(ReducePlan, SimpleNamespace(divided_over_shards=4.0))
    assert group.gradients._defer_or_reduce(group.params, plan)([piece])
    assert piece.tolist() == [1.5] * 3
