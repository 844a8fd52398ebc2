"""Optimizers that were built, or even stepped, before fully_shard go on with the sharded parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import fully_shard
from fsdp2._torch.tensors import dtensor_from_local
from fsdp2.optim import prebuilt
from tests.support.fake import fake_mesh
from tests.unit.meshes import gloo_mesh

OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adam_foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


def model(seed: int = 0) -> nn.Sequential:
    """Return a small model, equal for equal seeds."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Take steps on inputs that depend on the step alone."""
    for step in range(first, first + steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def whole(module: nn.Module) -> list[Tensor]:
    """Return the parameters; on one rank a shard is everything."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    """Assert equal parameters."""
    for a, b in zip(whole(module), whole(expected)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "before"), [(name, steps) for name in OPTIMIZERS for steps in (0, 2) if (name, steps) != ("lbfgs", 2)]
)
def test_training_goes_on_as_if_nothing_had_happened(name: str, before: int) -> None:
    expected, ours = model(), model()
    reference, optimizer = OPTIMIZERS[name](expected.parameters()), OPTIMIZERS[name](ours.parameters())
    train(expected, reference, before)
    train(ours, optimizer, before)
    with gloo_mesh() as mesh:
        fully_shard(ours, mesh=mesh)
        train(ours, optimizer, 3, before)
    train(expected, reference, 3, before)
    assert_same(ours, expected)


def test_state_of_all_parameters_together_cannot_be_cut() -> None:
    ours = model()
    optimizer = OPTIMIZERS["lbfgs"](ours.parameters())
    train(ours, optimizer, 2)
    with gloo_mesh() as mesh:
        fully_shard(ours, mesh=mesh)
        with pytest.raises(RuntimeError, match="the optimizer was stepped before fully_shard"):
            train(ours, optimizer, 1)


def give_gradients(module: nn.Module) -> None:
    """Set every sharded gradient to ones."""
    for param in module.parameters():
        param.grad = dtensor_from_local(torch.ones_like(param._local_tensor), param._spec)


@pytest.mark.parametrize("rank", range(3))
def test_state_is_cut_like_its_parameter(rank: int) -> None:
    ours = model()
    optimizer = torch.optim.Adam(ours.parameters())
    train(ours, optimizer, 2)
    before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in ours.parameters()]
    with fake_mesh(3, names=("dp",), rank=rank) as mesh:
        fully_shard(ours, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        give_gradients(ours)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        for param, state in zip(ours.parameters(), before):
            new = optimizer.state[param]
            assert new["step"].item() == 3.0 and not isinstance(new["step"], DTensor)
            pieces = state["exp_avg"].chunk(3, -1)
            expected = pieces[rank] if rank < len(pieces) else state["exp_avg"].narrow(-1, 0, 0)
            moment = new["exp_avg"]
            assert isinstance(moment, DTensor) and moment.shape == param.shape
            assert moment.placements == param.placements
            torch.testing.assert_close(moment.to_local(), expected * 0.9 + 0.1)


def test_groups_and_their_lists_stay_the_same(mesh: DeviceMesh) -> None:
    ours = model()
    groups = [{"params": list(ours[0].parameters()), "lr": 0.5}, {"params": list(ours[2].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    lists = [group["params"] for group in optimizer.param_groups]
    fully_shard(ours, mesh=mesh)
    give_gradients(ours)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert all(group["params"] is before for group, before in zip(optimizer.param_groups, lists))
    shown = [id(param) for param in ours.parameters()]
    assert [id(param) for params in lists for param in params] == shown


def test_optimizers_of_other_parameters_are_left_alone(mesh: DeviceMesh) -> None:
    other, ours = nn.Linear(2, 2), model()
    optimizer = torch.optim.SGD([*other.parameters(), *ours[0].parameters()], lr=0.1)
    kept = list(other.parameters())
    fully_shard(ours[2], mesh=mesh)
    before = list(optimizer.param_groups[0]["params"])
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before))
    assert all(a is b for a, b in zip(other.parameters(), kept))


def test_an_optimizer_whose_module_is_gone_steps_what_it_has(mesh: DeviceMesh) -> None:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    originals = list(ours.parameters())
    fully_shard(ours, mesh=mesh)
    del ours
    gc.collect()
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], originals))


def test_state_of_another_shape_is_refused_by_name(mesh: DeviceMesh) -> None:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    optimizer.state[ours[0].weight]["row_mean"] = torch.zeros(5)
    fully_shard(ours, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"0.weight: .* state 'row_mean' has shape \(5,\), expected \(5, 3\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="'row_mean'"):  # and not lost for the next step
        optimizer.step()


def test_state_that_is_no_tensor_or_a_number_is_kept(mesh: DeviceMesh) -> None:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    optimizer.state[ours[0].weight].update(note="kept", count=torch.tensor([7.0]))
    fully_shard(ours, mesh=mesh)
    optimizer.step()
    state = optimizer.state[ours[0].weight]
    assert state["note"] == "kept" and state["count"].tolist() == [7.0]


# ---- defects there were ----


def test_the_step_of_a_scalar_parameter_stays_a_plain_tensor(mesh: DeviceMesh) -> None:
    ours = model()
    ours.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam(ours.parameters())
    optimizer.state[ours.scale] = {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)}
    fully_shard(ours, mesh=mesh)
    optimizer.step()
    assert not isinstance(optimizer.state[ours.scale]["step"], DTensor)


def test_state_of_a_parameter_that_tensor_parallelism_cut_is_cut_further() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        ours = nn.Linear(4, 8, bias=False)
        local = torch.ones(4, 4)
        ours.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], (Shard(0),), run_check=False))
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        state = DTensor.from_local(torch.arange(16.0).view(4, 4), mesh["tp"], (Shard(0),), run_check=False)
        optimizer.state[ours.weight]["momentum_buffer"] = state
        fully_shard(ours, mesh=mesh["dp"])
        optimizer.step()
        moment = optimizer.state[ours.weight]["momentum_buffer"]._local_tensor
        assert torch.equal(moment, torch.arange(16.0).view(4, 4)[:2])


class PassesOn(torch.optim.Optimizer):
    """Has an optimizer and is none, as wrappers in some libraries, which do not call ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_optimizers_without_groups_do_not_end_the_first_forward() -> None:
    """A traceback keeps an optimizer whose ``__init__`` refused an argument. The first forward looks at all optimizers
    of the process, and raised "'Adam' object has no attribute 'param_groups'" there, as it did at a wrapper."""
    ours = model()
    with pytest.raises(ValueError, match="Invalid learning rate") as kept:
        torch.optim.Adam(ours.parameters(), lr=-1.0)
    wrapper = PassesOn(OPTIMIZERS["sgd"](ours.parameters()))
    with gloo_mesh() as mesh, mock.patch.object(prebuilt, "_knows_all", False):
        fully_shard(ours, mesh=mesh)
        ours(torch.ones(4, 3)).sum().backward()
    assert all(a is b for a, b in zip(wrapper.inner.param_groups[0]["params"], ours.parameters(), strict=True))
    del kept
