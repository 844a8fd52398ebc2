"""The private torch symbols for lists of tensors and for optimizers still mean what fsdp2 takes them to mean."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as checkpoints
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import swa_utils
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2.optim.local.local_step import _ELEMENTWISE
from tests.support.fake import fake_mesh
from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import probes


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=lambda kind: kind.__name__))
@probes("around_init_group")
def test_optimizers_compute_with_what_is_in_their_lists(kind: Any) -> None:
    names = list(inspect.signature(kind._init_group).parameters)
    assert names[1] == "group" and names[3] == "grads"
    shown, computed = nn.Parameter(torch.ones(3)), torch.zeros(3)
    optimizer = kind([shown], lr=0.1)
    seen: list[int] = []

    def around(collect: Callable[[], Any], group: dict[str, Any], lists: tuple[list[Any], ...]) -> Any:
        found = collect()
        assert group is optimizer.param_groups[0] and lists[0] == [shown] and lists[1] == [shown.grad]
        assert all(len(entries) in (0, 1) for entries in lists)
        seen.append(len(lists))
        lists[0][:] = [computed]
        return found

    _torch.around_init_group(optimizer, around)
    shown.grad = torch.ones(3)
    optimizer.step()
    assert seen and torch.equal(shown, torch.ones(3))
    assert kind is torch.optim.Rprop or not torch.equal(computed, torch.zeros(3))


@probes("split_averages")
def test_an_averaged_model_averages_kinds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_group_tensors_by_device_and_dtype"
    monkeypatch.setattr(swa_utils, name, getattr(swa_utils, name))  # to put it back
    _torch.split_averages(lambda tensor: tensor.ndim)
    seen: list[list[torch.Size]] = []

    def average(averages: Any, values: Any, count: Any) -> None:
        assert [t.shape for t in averages] == [t.shape for t in values]
        seen.append([t.shape for t in averages])
        torch._foreach_copy_(averages, values)

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=average)
    averaged.update_parameters(model)
    with torch.no_grad():
        model[1].bias.fill_(7)
    averaged.update_parameters(model)
    assert seen == [[(2, 3), (2, 2)], [(2,), (2,)]]
    assert torch.equal(averaged.module[1].bias, model[1].bias)


@probes("put_first_after_step")
def test_a_hook_after_the_step_can_be_put_first() -> None:
    parameter, seen = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([parameter])
    optimizer.register_step_post_hook(lambda *_: seen.append("second"))
    _torch.put_first_after_step(optimizer, optimizer.register_step_post_hook(lambda *_: seen.append("first")))
    optimizer.step()
    assert seen == ["first", "second"]


@probes("local_tensors", "dtensor_specs")
def test_lists_of_dtensors_and_others() -> None:
    with fake_mesh(2) as mesh:
        plain, local = torch.ones(2), torch.ones(1, 2)
        one = DTensor.from_local(local, mesh, (Shard(0),), run_check=False)
        locals_, specs = _torch.local_tensors([one, plain, None]), _torch.dtensor_specs([one, plain, None])
        assert locals_[0] is _torch.local_tensor(one) and locals_[1] is plain and locals_[2] is None
        assert specs == [_torch.dtensor_spec(one), None, None]


@probes("carry_attribute")
def test_copies_of_optimizers_carry_an_attribute(unpatched: None) -> None:
    _torch.carry_attribute("_of_the_test", lambda copy, value: setattr(copy, "restored", (value, copy.param_groups)))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not hasattr(copy.deepcopy(optimizer), "restored")
    optimizer._of_the_test = "value"
    for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one.restored == ("value", one.param_groups) and not hasattr(one, "_of_the_test")
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._of_the_test == "value" and not hasattr(optimizer, "restored")


@probes("foreach_copy")
def test_a_list_of_tensors_is_copied_and_cast_at_once() -> None:
    targets = [torch.zeros(2), torch.zeros(2, 2).t(), torch.zeros(2, 3)[:, :1]]
    sources = [torch.ones(2, dtype=torch.bfloat16), torch.arange(4.0).view(2, 2), torch.ones(1, 1).expand(2, 1)]
    _torch.foreach_copy(targets, sources)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(targets, sources))


@probes("foreach_norm", "foreach_mul")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_products_of_lists(dtype: torch.dtype) -> None:
    tensors = [torch.full((4,), 3.0, dtype=dtype), torch.zeros(2, dtype=dtype)]
    norms = _torch.foreach_norm(tensors, 2.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(6.0, torch.float32), (0.0, torch.float32)]
    _torch.foreach_mul(tensors, torch.tensor(0.5))
    assert tensors[0].tolist() == [1.5] * 4


@probes("dynamo_is_tracing")
def test_dynamo_tells_that_it_traces() -> None:
    inside: list[bool] = []

    class Optimizer(torch.optim.SGD):
        def _init_group(self, *args: Any) -> Any:
            inside.append(_torch.dynamo_is_tracing())
            return super()._init_group(*args)

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = Optimizer([parameter])
    optimizer.step()
    assert inside == [False]
    torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()
    assert inside[1] and not _torch.dynamo_is_tracing()


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what ``around_use`` replaces."""
    base = torch.optim.Optimizer
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group", "__getstate__", "__setstate__"):
        monkeypatch.setattr(base, name, getattr(base, name))
    monkeypatch.setattr(checkpoints, "_init_optim_state", checkpoints._init_optim_state)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


@probes("around_use")
def test_optimizers_zero_and_are_given_parameters_by_methods_of_their_base(unpatched: None) -> None:
    seen = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    unused = lambda *_: None
    _torch.around_use(
        lambda o: seen.append(shown.grad),
        unused,
        lambda o: seen.append(len(o.param_groups)),
        lambda o: unused,
        contextlib.nullcontext,
    )
    shown = nn.Parameter(torch.ones(3))
    optimizer = Own([{"params": [shown]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert seen == [1, 2, 3]
    grad = shown.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert seen[3] is grad and torch.equal(shown.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert seen[4] is grad and shown.grad is None


@probes("around_use")
def test_optimizers_save_and_load_by_methods_of_their_base(unpatched: None) -> None:
    seen, unused = [], lambda *_: None

    def around(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        before = optimizer.param_groups[0]["lr"]
        return lambda: seen.append((before, optimizer.param_groups[0]["lr"]))

    @contextlib.contextmanager
    def making(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        seen.append("looked for" if optimizer.state else "to be made")
        yield
        assert optimizer.state
        seen.append("there")

    _torch.around_use(unused, lambda o: seen.append("read"), unused, around, making)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.load_state_dict(state)
    assert seen == ["read", (0.2, 0.1)]
    copy.deepcopy(optimizer)
    pickle.dumps(optimizer)
    assert seen[2:] == ["read", "read"]
    # torch's checkpoints look the parameters of an optimizer up; before that they make its state, if it has none.
    del seen[:]
    saved = checkpoints.get_optimizer_state_dict(model, optimizer)
    assert seen[:2] == ["to be made", "there"]
    del seen[:]
    checkpoints.set_optimizer_state_dict(model, optimizer, saved)
    assert seen[:2] == ["looked for", "there"]


@probes("note_step")
def test_a_scheduler_looks_whether_the_optimizer_has_stepped() -> None:
    """It warns of a step that it has not wrapped, unless that carries its mark, and of one that comes too late."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @functools.wraps(optimizer.step)
    def step(self: torch.optim.Optimizer) -> None: ...

    optimizer.step = types.MethodType(step, optimizer)
    with pytest.warns(UserWarning, match="lr_scheduler"):
        scheduler.step()
    again = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _torch.note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.step()


@probes("inner_tensors", "with_inner_tensors")
def test_a_subclass_tells_the_tensors_that_it_is_made_of() -> None:
    """Wrapper subclasses have this protocol for compilers; torch has such a one for its own tests."""
    plain = torch.ones(2)
    assert _torch.inner_tensors(plain) == [plain] and _torch.with_inner_tensors(plain, [plain]) is plain
    pair = TwoTensor(plain, torch.zeros(2))
    assert [one.tolist() for one in _torch.inner_tensors(pair)] == [[1.0, 1.0], [0.0, 0.0]]
    other = _torch.with_inner_tensors(pair, [pair.b, pair.a])
    assert isinstance(other, TwoTensor) and other.a is pair.b and other.b is pair.a and other.shape == (2,)
