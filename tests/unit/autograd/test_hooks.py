"""Hooks: backward tells when it is through with a module's inputs and about to enter by its outputs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2._torch.autograd import autograd_sequence_number, entries_from_elsewhere
from fsdp2.autograd.boundary import Boundary
from fsdp2.autograd.hooks import Arguments, hook_forward, hook_gradient, hook_state_dict, watch_exit
from fsdp2.autograd.side_outputs import SideOutputs
from fsdp2.autograd.trees import Tree


class Log(list):
    """Notes what happened, in order."""

    def done(self) -> None:
        """Backward is through with the inputs."""
        self.append("done")

    def starting(self, grad: Tensor) -> None:
        """Backward is about to enter."""
        self.append("starting")

    def leaf(self, name: str) -> Tensor:
        """Return a leaf that notes when its gradient is there."""
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_post_accumulate_grad_hook(lambda t: self.append(name))
        return leaf

    def through(self, x: Tensor, name: str) -> Tensor:
        """Return ``x`` times a parameter that notes when its gradient is there."""
        return x * self.leaf(name)


def boundary() -> Boundary:
    """Return the boundary of a call that begins now, of a module without parameters."""
    sides = SideOutputs((), lambda module: False, set())
    new = Boundary(lambda tensors: tensors, sides, torch.device("cpu"))
    new.first_node = autograd_sequence_number()
    return new


def watch_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], done: Any, starting: Any = lambda grad: None
) -> tuple[Arguments, bool, Boundary]:
    """Return the arguments with hooks, whether none of them needs a gradient, and the boundary of the call."""
    call, given = boundary(), Tree((*args, *kwargs.values()))
    need_none = call.watch_inputs(given, done, starting)
    return call.enter(given, args, kwargs), need_none, call


def watch_outputs(output: Any, starting: Any, since: int) -> tuple[bool, Any]:
    """Return whether an output needs a gradient, and the output."""
    call, result = boundary(), Tree((output,), results=True)
    call.first_node = since
    return call.watch_results(result, starting), result.rebuilt()[0]


class Box:
    """A plain object."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


# ---- inputs ----


def test_done_comes_when_the_gradient_of_the_only_input_is_computed() -> None:
    log = Log()
    (args, kwargs), need_none, _ = watch_inputs((log.leaf("input"), 3), {"scale": torch.ones(2)}, log.done)
    assert not need_none and args[1] == 3
    log.through(args[0] * kwargs["scale"], "parameter").sum().backward()
    assert log == ["parameter", "done", "input"]


@pytest.mark.parametrize("inputs", [1, 2])
def test_each_backward_of_a_backward_is_told_where_it_enters(inputs: int) -> None:
    """By the gradient that left by the inputs; the third one by the gradient that the second sent out by the output."""
    log = Log()
    leaves = [torch.ones(2, requires_grad=True) for _ in range(inputs)]
    unused = [torch.ones(2, requires_grad=True)] * (inputs - 1)  # has no gradient that a backward could enter by

    def starting(grad: Tensor) -> None:
        log.starting(grad)
        if torch.is_grad_enabled():
            watch_exit(grad, starting)

    (given, _), _, _ = watch_inputs((*leaves, *unused), {}, log.done, starting)
    _, output = watch_outputs(sum(x**4 for x in given[:inputs]), starting, autograd_sequence_number())
    above = output**2
    gradients = torch.autograd.grad(above.sum(), leaves, create_graph=True)
    assert log == ["starting", "done"]
    log.clear()
    torch.autograd.grad(sum(g.sum() for g in gradients), leaves, create_graph=True)
    assert log[0] == "starting" and log[-1] == "done"


def test_hooks_run_where_the_module_computes() -> None:
    """Autograd has a thread for each device: the node on inputs elsewhere is one of the module's device."""
    log = Log()
    away = torch.ones(1, device="meta", requires_grad=True)
    for others in ((), (log.leaf("a"), log.leaf("b"))):
        (given, _), _, _ = watch_inputs((away, *others), {}, log.done)
        assert [tensor.device.type for tensor in given] == ["meta", *("cpu" for _ in others)]
        assert all(tensor.grad_fn is given[0].grad_fn for tensor in given)
        assert entries_from_elsewhere(given[0], torch.device("cpu"), 0) == [(given[0].grad_fn, given[0].output_nr)]
        given[0].backward(torch.ones(1, device="meta"))
        assert log[0] == "done" and away.grad is not None
        log.clear()


class Away(torch.autograd.Function):
    """Something that is computed on another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]  # torch's are untyped
        return x.to("meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch's are untyped
        return torch.ones(grad.shape)


def test_results_on_another_device() -> None:
    """Backward enters where it comes back to the module's device."""
    log = Log()
    leaf = log.leaf("a")
    call = boundary()
    away = Away.apply(leaf * 2).sin()
    assert call.watch_results(Tree((away,), results=True), log.starting)
    away.backward(torch.ones(2, device="meta"))
    assert log == ["starting", "a"]


def test_a_backward_that_cannot_be_differentiated_is_not_watched() -> None:
    log = Log()
    leaf = torch.ones(2, requires_grad=True)
    ((given,), _), _, _ = watch_inputs((leaf,), {}, log.done, log.starting)
    (given**2).sum().backward()
    assert log == ["done"]


def test_done_comes_once_when_the_gradients_of_all_inputs_are_computed() -> None:
    log = Log()
    inputs = (log.leaf("a"), log.leaf("b"))
    ((a,), kwargs), need_none, _ = watch_inputs(inputs[:1], {"b": inputs[1]}, log.done)
    assert not need_none
    log.through(log.through(a, "first") + kwargs["b"], "second").sum().backward()
    assert log[:-2] == ["second", "first", "done"] and sorted(log[-2:]) == ["a", "b"]
    assert all(torch.equal(leaf.grad, torch.ones(2)) for leaf in inputs)


def test_an_input_that_is_not_used_does_not_hold_up_the_others() -> None:
    """It gets no gradient, as without hooks: an optimizer with weight decay would step by zeros."""
    log = Log()
    used, unused = log.leaf("used"), torch.ones(2, requires_grad=True)
    ((a, _), _), _, _ = watch_inputs((used, unused), {}, log.done)
    (a * 2).sum().backward()
    assert log == ["done", "used"] and unused.grad is None


def test_one_tensor_in_two_places_is_done_when_both_are() -> None:
    log, leaf = Log(), torch.ones(2, requires_grad=True)
    ((a, b), _), _, _ = watch_inputs((leaf, leaf), {}, log.done)
    assert a is b  # the module may ask
    log.through(log.through(a, "first") + b, "second").sum().backward()
    assert log == ["second", "first", "done"]
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


def test_one_tensor_in_two_places_beside_another() -> None:
    log, twice, once = Log(), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (args, kwargs), _, _ = watch_inputs((twice, [once]), {"again": twice}, log.done)
    assert args[0] is kwargs["again"] is not args[1][0]
    log.through(args[0] * args[1][0] + kwargs["again"], "parameter").sum().backward()
    assert log == ["parameter", "done"]
    assert torch.equal(twice.grad, torch.full((2,), 2.0)) and torch.equal(once.grad, torch.ones(2))


def test_inputs_in_containers_are_watched_and_containers_keep_their_type() -> None:
    log = Log()
    (args, kwargs), need_none, _ = watch_inputs(([log.leaf("a")],), {"more": {"b": (log.leaf("b"),)}}, log.done)
    assert not need_none and isinstance(args[0], list) and isinstance(kwargs["more"]["b"], tuple)
    (args[0][0] + kwargs["more"]["b"][0]).sum().backward()
    assert log[0] == "done" and log.count("done") == 1


@pytest.mark.parametrize("place", [0, 1])
def test_only_the_input_that_needs_a_gradient_is_replaced(place: int) -> None:
    plain = torch.ones(2)
    given: list[Any] = [plain, plain]
    given[place] = torch.ones(2, requires_grad=True)
    (args, _), need_none, _ = watch_inputs(tuple(given), {}, lambda: None)
    assert not need_none
    assert args[1 - place] is plain and args[place] is not given[place]
    assert torch.equal(args[place], given[place])


@pytest.mark.parametrize(
    "args", [(), (None, 2, "text"), (torch.ones(2), [torch.ones(1)])], ids=["none", "other", "plain"]
)
def test_without_an_input_that_needs_a_gradient_nothing_changes(args: tuple[Any, ...]) -> None:
    kwargs = {"mask": torch.ones(2, dtype=torch.bool)}
    (new_args, new_kwargs), need_none, _ = watch_inputs(args, kwargs, pytest.fail)
    assert need_none and all(map(operator.is_, new_args, args)) and new_kwargs == kwargs


def test_inputs_inside_plain_objects_need_no_hooks_beside_others() -> None:
    """The hooks on the others come last, also if what uses the hidden input is behind the rest of the module."""

    hidden = Box(torch.ones(2, requires_grad=True))
    args = (hidden,)
    (new_args, _), need_none, _ = watch_inputs(args, {}, pytest.fail)
    assert not need_none and new_args == args
    log = Log()
    for used in (True, False):
        (new_args, _), need_none, call = watch_inputs((hidden, log.leaf("input")), {}, log.done)
        assert not need_none and new_args[0] is hidden
        output = log.through(new_args[1] * 2, "with the input")
        late = log.through(hidden.value * 3, "with the hidden one") if used else 0
        call.end()
        (output * 4 + late).sum().backward()
    assert log == ["with the hidden one", "with the input", "done", "input", "with the input", "done", "input"]


@pytest.mark.parametrize("of", ["its own", "a part", "a view"])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_single_input_may_be_changed_in_place(of: str, used_before: bool) -> None:
    """Done comes after everything in the module, and once; it never came, so the unit stayed to the end of backward."""
    log = Log()
    made = log.leaf("leaf") * 1
    x = {"its own": made, "a part": made[:1], "a view": made.view(2, 1)}[of]
    ((view,), _), _, call = watch_inputs((x,), {}, log.done)
    before = log.through(view * 2, "before").sum() if used_before else 0
    view.mul_(3)
    output = log.through(view * 1, "after").sum() + before
    assert (view == 3).all()
    call.end()
    output.backward()
    inside = ["after", "before"] if used_before else ["after"]
    assert log == [*inside, "done", "leaf"]


@pytest.mark.parametrize("part", [False, True])
def test_backward_may_enter_by_an_argument_that_was_written(part: bool) -> None:
    """What the module has not written is no entry, even if its node is new, as that of a view of what was changed."""
    log = Log()
    written, view = torch.zeros(4), (base := log.leaf("input") * 1).view(2)
    base.mul_(2)
    ((to, x), _), _, call = watch_inputs((written[:2] if part else written, view), {}, log.done)
    to[:2].add_(log.through(x, "parameter"))
    call.end()
    call.watch_results(Tree((None,), results=True), log.starting)
    written.sum().backward()
    assert log == ["starting", "parameter", "done", "input"]


def test_a_backward_without_the_inputs_is_never_done() -> None:
    log = Log()
    ((a,), _), _, _ = watch_inputs((log.leaf("a"),), {}, log.done)
    log.through(a.detach(), "parameter").sum().backward()
    assert log == ["parameter"]


# ---- outputs ----


@pytest.mark.parametrize("returned", [lambda output: output, Box], ids=["itself", "inside an object"])
def test_starting_comes_before_anything_in_the_module(returned: Callable[[Tensor], object]) -> None:
    log, since = Log(), autograd_sequence_number()
    output = log.through(torch.ones(2), "parameter")
    assert watch_outputs(returned(output), log.starting, since)[0]
    (output * 2).sum().backward()
    assert log == ["starting", "parameter"]


def test_every_output_may_be_the_first_that_backward_meets() -> None:
    log, since = Log(), autograd_sequence_number()
    output = {"a": log.through(torch.ones(2), "a"), "b": [log.through(torch.ones(2), "b")]}
    assert watch_outputs(output, log.starting, since)[0]
    output["b"][0].sum().backward()
    assert log == ["starting", "b"]
    output["a"].sum().backward()
    assert log == ["starting", "b", "starting", "a"]


def test_outputs_that_need_no_gradient_are_not_watched() -> None:
    assert not watch_outputs((torch.ones(2), None, "text"), pytest.fail, 0)[0]


def test_an_input_that_is_passed_on_takes_part_without_starting_anything() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert watch_outputs(leaf, pytest.fail, autograd_sequence_number())[0]
    leaf.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2))


def test_a_view_that_is_changed_afterwards_still_starts_the_module() -> None:
    log, since = Log(), autograd_sequence_number()
    output = log.through(torch.ones(2), "parameter")[:1]
    assert watch_outputs(output, log.starting, since)[0]
    output.add_(1)
    output.sum().backward()
    assert log[0] == "starting" and log[-1] == "parameter"


def test_a_view_of_an_input_does_not_start_the_module_that_made_the_input() -> None:
    """The base is older than the module's forward: its backward is another module's."""
    log = Log()
    made_before = log.through(torch.ones(2), "other module")
    since = autograd_sequence_number()
    output = made_before[:1]
    watch_outputs(output, log.starting, since)
    made_before.sum().backward()
    assert log == ["other module"]


# ---- registration ----


def test_forward_hooks_are_the_outermost_ones() -> None:
    log, module = [], nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *args: log.append("user's before"))
    module.register_forward_hook(lambda *args: log.append("user's after"))

    def before(m: nn.Module, args: Any, kwargs: Any) -> Any:
        log.append("before")
        return (args[0] * 2,), kwargs

    def after(m: nn.Module, args: Any, output: Any) -> Any:
        log.append("after")
        return output * 0

    handles = hook_forward([module], before, after)
    assert not module(torch.ones(2)).any()
    assert log == ["before", "user's before", "user's after", "after"]
    for pair in handles:
        for handle in pair:
            handle.remove()
    module(torch.ones(2))
    assert log[4:] == ["user's before", "user's after"]


class Owner:
    """What hooks on a leaf belong to."""


def test_state_dict_hooks_bracket_saving_and_loading() -> None:
    log, module, owner = [], nn.Linear(2, 2), Owner()
    names = ("save", "saved", "load", "loaded")
    hook_state_dict([module], owner, *(lambda own, *args, n=name: log.append((n, own)) for name in names))
    state = module.state_dict()
    assert log == [("save", owner), ("saved", owner)]
    module.load_state_dict(state)
    assert log == [(name, owner) for name in names]


def test_state_dict_hooks_belong_to_the_copy_of_their_owner() -> None:
    """They hold their owner weakly, and ``copy`` takes weak references as they are."""
    log, module, owner, memo = [], nn.Linear(2, 2), Owner(), {}
    hook_state_dict([module], owner, *[lambda own, *args: log.append(own)] * 4)
    copied = copy.deepcopy(owner, memo)
    clone = copy.deepcopy(module, memo)
    clone.load_state_dict(clone.state_dict())
    assert log == [copied] * 4
    log.clear()
    del owner, copied
    memo.clear()
    clone.load_state_dict(copy.deepcopy(module).state_dict())
    assert log == []


def test_a_gradient_hook_sees_the_finished_gradient() -> None:
    seen, leaf = [], torch.ones(2, requires_grad=True)
    hook_gradient(leaf, lambda t: seen.append((t is leaf, t.grad.tolist())))
    (leaf * 2 + leaf).sum().backward()
    assert seen == [(True, [3.0, 3.0])]


def test_several_inputs_cannot_be_changed_in_place() -> None:
    """``residual += branch(hidden)`` in a block that gets both is refused by autograd, as under torch's fully_shard."""
    hidden, residual = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
    ((hidden, residual), _), _, _ = watch_inputs((hidden, residual), {}, lambda: None)
    with pytest.raises(RuntimeError, match="modified inplace"):
        residual += hidden * 2


# ---- torch.func ----


def test_outputs_of_a_transform_tell_backward_outside_of_it() -> None:
    log, leaf = Log(), torch.ones(2, requires_grad=True)

    def function(x: Tensor) -> Any:
        output = {"y": x * leaf, "count": torch.arange(2)}
        _, told = watch_outputs(output, log.starting, 0)
        assert told["count"] is output["count"]
        return told["y"]

    output, tangent = torch.func.jvp(function, (torch.ones(2),), (torch.full((2,), 3.0),))
    assert not log
    output.sum().backward(retain_graph=True)
    assert len(log) == 1
    tangent.sum().backward()
    assert len(log) == 2 and leaf.grad is not None and leaf.grad.tolist() == [4.0, 4.0]


def test_a_single_input_of_a_transform_tells() -> None:
    log, leaf = Log(), torch.ones(2, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        ((view,), _), need_none, _ = watch_inputs((leaf,), {}, log.done)
        assert not need_none
        return view * x

    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))[0].sum().backward()
    assert log == ["done"] and leaf.grad is not None


def test_outside_of_transforms_outputs_stay_as_they_are() -> None:
    output = (torch.ones(2), torch.ones(2, requires_grad=True))
    assert watch_outputs(output, pytest.fail, 0)[1] is output
