"""Hooks on modules, autograd nodes, tensors and optimizers. No other file registers any.

Most hooks are bound methods of objects that belong to the module, and are freed with it. Hooks on modules that only
hold parameters refer to their owner weakly, because the owner refers to the whole model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp2._torch.autograd import (
    entries_from_elsewhere,
    functorch_active,
    gradient_hook_tables,
    in_each_transform,
    is_made_since,
    tangents_of,
    view_base,
)
from fsdp2._torch.hooks import skipped_by_dynamo
from fsdp2._torch.modules import overrides_setattr
from fsdp2._torch.optimizers import put_first_after_step
from fsdp2._torch.tensors import AsyncCollectiveTensor, uncount_write

__all__ = [
    "ChildList",
    "after_steps",
    "around_loading_once",
    "hook_error",
    "hook_every_step",
    "hook_forward",
    "hook_gradient",
    "hook_loading",
    "hook_modules",
    "hook_next_step",
    "hook_optimizers",
    "hook_registrations",
    "hook_saving",
    "hook_state_dict",
    "registrations",
    "watch_exit",
    "watch_inputs",
    "watch_outputs",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_INSERTING = (nn.ModuleList, nn.Sequential)
_children_of = attrgetter("_modules")


def hook_forward(
    modules: Iterable[nn.Module],
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Arguments],
    after: Callable[[nn.Module, Any, Any], Any],
) -> list[tuple[RemovableHandle, RemovableHandle]]:
    """Call ``before`` and ``after`` around the forwards of ``modules`` and around the hooks that these have so far."""
    return [
        (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, prepend=False),
        )
        for module in modules
    ]


def hook_error(module: nn.Module, left: Callable[..., None]) -> None:
    """Call ``left(module, args, output)`` after each forward of ``module``, also when an exception leaves it.

    ``output`` is None then, unless a forward hook has raised the exception.
    """
    module.register_forward_hook(left, always_call=True)


def hook_saving(
    modules: Iterable[nn.Module], after: Callable[..., None], before: Callable[..., None] | None = None
) -> list[RemovableHandle]:
    """Call ``before`` before ``state_dict`` saves each module, and ``after`` when all modules below it are saved."""
    handles = []
    for module in modules:
        if before is not None:
            handles.append(module.register_state_dict_pre_hook(before))
        handles.append(module.register_state_dict_post_hook(after))
    return handles


def hook_loading(
    modules: Iterable[nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> list[RemovableHandle]:
    """Call ``before`` before ``load_state_dict`` loads each module, ``after`` when all modules below it are loaded."""
    handles = []
    for module in modules:
        handles.append(module.register_load_state_dict_pre_hook(before))
        handles.append(module.register_load_state_dict_post_hook(after))
    return handles


def hook_state_dict(
    modules: Iterable[nn.Module],
    owner: object,
    before_save: Callable[..., None],
    after_save: Callable[..., None],
    before_load: Callable[..., None],
    after_load: Callable[..., None],
) -> None:
    """Call functions before and after ``state_dict`` and ``load_state_dict`` of modules that show managed parameters.

    The first argument of each call is ``owner``. The hooks refer to it weakly, because it refers to the whole model: a
    module that the user keeps must not keep the model alive.
    """
    for module in modules:
        hook_saving([module], _OwnedHook(after_save, owner), _OwnedHook(before_save, owner))
        hook_loading([module], _OwnedHook(before_load, owner), _OwnedHook(after_load, owner))


class _OwnedHook:
    """Calls a function with an object that it does not keep alive, and does nothing once the object is freed.

    A bound method would keep the object alive, and torch could not set the attributes with which it marks hooks.
    """

    def __init__(self, function: Callable[..., None], owner: object) -> None:
        self._function = function
        self._owner = weakref.ref(owner)

    def __call__(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnedHook:
        """Return a hook of the owner's copy, which comes from ``memo``: ``copy`` does not follow weak references."""
        owner = self._owner()
        copied = copy.copy(self)
        if owner is not None:
            copied._owner = weakref.ref(copy.deepcopy(owner, memo))
        return copied


def hook_gradient(param: torch.Tensor, finished: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``finished(param)`` whenever a backward, or the reduction that follows it, has added to ``param.grad``."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(finished)
    return handle


registrations = 0
"""The number of parameters and modules that other code has registered on managed modules so far."""


def hook_registrations(is_ours: Callable[[Any], bool], at_new_place: Callable[[nn.Module, str, Any], None]) -> None:
    """Count registrations on managed modules, which may add or tie parameters. It costs nothing per step.

    ``at_new_place(module, name, tensor)`` is called before a tensor of ours is registered where no parameter is, on a
    managed module or a parametrization.

    A tensor for which ``is_ours`` returns True counts only if it replaces another one, which ties two parameters. It
    never counts on a module that overrides ``__setattr__``, where we show shards and full parameters by registering
    them.

    A parametrization that is registered by a forward (PEFT's ``target_parameters``) sets the full parameter to itself
    first. That changes nothing, so it does not count as a write, which would be refused because it is lost.
    """

    def registered(module: nn.Module, name: str, value: Any) -> None:
        global registrations
        managed = module.__dict__.get("_is_fsdp_managed_module")
        if (managed or type(module) is ParametrizationList) and is_ours(value) and module._parameters.get(name) is None:
            at_new_place(module, name, value)
        if type(module) is ParametrizationList and type(value) is nn.Parameter and is_ours(value):
            swaps = torch.__future__.get_swap_module_params_on_conversion()  # then torch swaps, which counts nothing
            if not swaps and not any(hasattr(one, "right_inverse") for one in module):
                uncount_write(value)
        if not managed or value is None:
            return
        if not is_ours(value) or (module._parameters.get(name) is not value and not overrides_setattr(module)):
            registrations += 1

    register_module_parameter_registration_hook(registered)
    register_module_module_registration_hook(registered)


def hook_modules(registered: Callable[[nn.Module, str, Any], None]) -> None:
    """Call ``registered(module, name, child)`` before any module of the process gets a child; it may raise."""
    register_module_module_registration_hook(registered)


class ChildList:
    """Counts registrations below ``module`` that call no hook: ``insert`` of torch's containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._list()

    def _list(self) -> None:
        modules = self._module.modules()
        self._parents = [inner for inner in modules if inner._modules or isinstance(inner, _INSERTING)]
        self._children = self._find()

    def _find(self) -> list[nn.Module | None]:
        # One pass in C, because each forward asks. ``_modules`` is read each time: deleting a child replaces it.
        return [*chain.from_iterable(map(dict.values, map(_children_of, self._parents)))]

    def look(self) -> None:
        """Count a registration if there are other children than before, or in another order."""
        global registrations
        if self._children != self._find():
            self._list()
            registrations += 1


def hook_optimizers(before_step: Callable[..., None], after_step: Callable[..., None]) -> None:
    """Call functions before and after ``step`` of every optimizer in the process, also of optimizers built later."""
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def hook_every_step(before: Callable[[], None]) -> RemovableHandle:
    """Call ``before`` at every step, ahead of the optimizer's own hooks. The caller removes the handle.

    It also reaches an optimizer inside a wrapper that has no hooks, such as accelerate's.
    """
    return register_optimizer_step_pre_hook(lambda *unused: before())


def hook_next_step(optimizer: torch.optim.Optimizer, before: Callable[[], None]) -> RemovableHandle:
    """Call ``before`` after all other pre-hooks of the next step. The caller removes the handle after the step."""
    return optimizer.register_step_pre_hook(lambda *unused: before())


def after_steps(optimizer: torch.optim.Optimizer, restore: Callable[[], None]) -> None:
    """Call ``restore`` before all other hooks after a step, and before the optimizer's state is saved or replaced."""
    put_first_after_step(optimizer, optimizer.register_step_post_hook(lambda *unused: restore()))
    optimizer.register_state_dict_pre_hook(lambda *unused: restore())
    optimizer.register_load_state_dict_pre_hook(lambda *unused: restore())


@contextmanager
def around_loading_once(
    optimizer: torch.optim.Optimizer,
    before: Callable[[dict[str, Any]], dict[str, Any]],
    after: Callable[[], None],
) -> Iterator[None]:
    """Let a load inside the block take ``before(state_dict)``, what other hooks leave, and call ``after`` first."""
    handles = [
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: before(state_dict)),
        optimizer.register_load_state_dict_post_hook(lambda _: after(), prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch_inputs(
    inputs: list[torch.Tensor],
    done: Callable[[], None],
    starting: Callable[[torch.Tensor], None],
    device: torch.device,
) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    """Return ``inputs``, which all require a gradient, with hooks: ``done`` runs when backward has all their gradients.

    The second result, unless it is None, is a function to call when the module's forward ends.

    A later backward through these gradients (``create_graph=True``) calls ``starting`` first.

    A single input becomes a view with a hook on its node, so that the module may still change it in place. Several go
    through one autograd function, because its backward runs only when all gradients are there. So does a single input
    that a collective is still writing, or that lies on another device than the module's, ``device``.

    Nothing is watched if an input is sparse or nested, since such a tensor has no views, and no autograd function can
    return it; nor if one is a dual number, whose tangent has a graph of its own.
    """
    # A nested tensor of the default kind calls itself strided.
    if any([t.layout is not torch.strided or t.is_nested for t in inputs]) or tangents_of(inputs):
        return inputs, None
    here = inputs[0].device == device
    if here and len(inputs) == 1 and not isinstance(inputs[0], AsyncCollectiveTensor):
        view = inputs[0].view_as(inputs[0])
        hook = _OneInput(done, starting)
        givens, views = inputs, [view]
        if functorch_active():  # both have a node in each transform, and backwards of each come by their own
            givens, views = in_each_transform(inputs[0]), in_each_transform(view)
        for one in views:
            if one.grad_fn is not None:
                one.grad_fn.register_prehook(hook)
        return [view], partial(hook.follow, [*map(_made_by, givens)], views[-1], views[-1]._version)
    # Autograd runs a function on the thread of its first tensor's device, and hooks of ours on that of ``device``.
    before = [] if here else [torch.empty(0, device=device)]
    return [*_SeveralInputs.apply(done, starting, *before, *inputs)][len(before) :], None


def _made_by(tensor: torch.Tensor) -> Any:
    """Return the node that stays below ``tensor``, or the tensor that it is a view of, when it is changed in place."""
    base = view_base(tensor)
    return tensor.grad_fn if base is None else base.grad_fn


class _OneInput:
    """The hook on the node of a single input, which backward does not come to if the module has changed the input.

    Then it goes from the change to what made the input, and the hook is there.
    """

    __slots__ = ("_changed", "_watchers")

    def __init__(self, done: Callable[[], None], starting: Callable[[torch.Tensor], None]) -> None:
        self._watchers = done, starting
        self._changed = False

    @skipped_by_dynamo
    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        """Run before the view's node: what was computed before a change comes here, and something may be left."""
        return None if self._changed else _inputs_are_done(grads, *self._watchers)

    def follow(self, made_by: list[Any], view: torch.Tensor, version: int) -> None:
        """Watch the nodes that made the input instead, in each transform one, if the module has changed it."""
        nodes = [node for node in made_by if node is not None]
        if view._version != version and nodes:
            self._changed = True
            for node in nodes:
                node.register_prehook(skipped_by_dynamo(lambda grads: _inputs_are_done(grads, *self._watchers)))


def _inputs_are_done(
    grads: Iterable[torch.Tensor | None], done: Callable[[], None], starting: Callable[[torch.Tensor], None]
) -> tuple[torch.Tensor | None, ...]:
    """Watch ``grads``, the gradients of all inputs, for a second backward, and call ``done``.

    Return the gradients to go on with.
    """
    new = tuple([_watch_entry(grad, starting) for grad in grads])
    done()
    return new


def _watch_entry(grad: torch.Tensor | None, starting: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
    """Call ``starting`` before a second-order backward enters through ``grad``, which this backward has computed.

    Return ``grad``. Inside a transform of ``torch.func`` return the output of a node that calls ``starting``, because
    hooks see no backward outside of the transform.
    """
    if grad is None or not torch.is_grad_enabled():
        return grad
    if functorch_active():
        entered: torch.Tensor = _BackwardStarts.apply(starting, grad)
        return entered
    if grad.requires_grad and not grad.is_leaf:
        grad.register_hook(starting)
    return grad


def watch_exit(grad: torch.Tensor | None, starting: Callable[[torch.Tensor], None]) -> None:
    """Watch for a third backward through the gradients that a second backward computes for ``grad``.

    ``grad`` is a gradient of a module's output, so a backward of this backward leaves the module there. It is None if
    nothing was computed from that output, but from another output of the same autograd function.
    """
    if grad is not None and grad.requires_grad and not grad.is_leaf:
        grad.register_hook(skipped_by_dynamo(lambda outgoing: _watch_entry(outgoing, starting)))


class _SeveralInputs(torch.autograd.Function):
    """The identity on several tensors. Its backward runs when all their gradients are there.

    Forward waits for an input that a collective of tensor parallelism is still writing. A compiled module would treat
    such an input as one that needs no gradient, and the modules before it would get none.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(done: Any, starting: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]  # torch's are untyped
        return tuple(t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.watchers = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    @skipped_by_dynamo
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]  # torch's are untyped
        return (None, None, *_inputs_are_done(grads, *ctx.watchers))

    @staticmethod
    def jvp(ctx: Any, done: None, starting: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]  # torch's are untyped
        return tangents


def watch_outputs(
    tensors: list[torch.Tensor],
    starting: Callable[[torch.Tensor], None],
    since: int,
    device: torch.device,
) -> tuple[bool, list[torch.Tensor]]:
    """Call ``starting`` before backward enters the module, which computes on ``device``, through one of ``tensors``.

    Return whether one of them requires a gradient, and ``tensors``, replaced under ``torch.func``.

    Autograd has a thread for each device, and hooks of ours run on that of ``device``. So the hook of a tensor that
    lies elsewhere is on the node by which backward comes to ``device``.

    A hook on a view is lost if the view is changed in place afterwards, because autograd then goes through its base.
    The base is therefore watched too if the module made it, that is, if its node is not older than ``since``.

    Backward may also enter through the tangent of a dual number (``torch.autograd.forward_ad``).

    Inside a transform of ``torch.func``, ``requires_grad`` is False although a backward outside of the transform may
    reach the tensors. They are replaced by outputs of a node that calls ``starting`` in backward.
    """
    watched = False
    for tensor in [*tensors, *tangents_of(tensors)]:
        if not tensor.requires_grad:
            continue
        watched = True
        if tensor.is_leaf:  # the module has not computed it, so backward does not enter the module here
            continue
        if tensor.device != device:
            for node, output in entries_from_elsewhere(tensor, device, since):
                node.register_prehook(partial(_start_by, output, starting))
            continue
        _hook_before_others(tensor, starting)
        base: Any = view_base(tensor)
        if base is not None and is_made_since(base.grad_fn, since):
            base.grad_fn.register_prehook(partial(_start_by, base.output_nr, starting))
    if functorch_active():
        tensors = [
            _BackwardStarts.apply(starting, t) if t.is_floating_point() or t.is_complex() else t for t in tensors
        ]
    return watched, tensors


@skipped_by_dynamo
def _start_by(output: int, starting: Callable[[torch.Tensor], None], grads: tuple[torch.Tensor | None, ...]) -> None:
    """Call ``starting`` with the gradient of one ``output`` of a node, unless backward comes by its other outputs."""
    grad = grads[output]
    if grad is not None:
        starting(grad)


def _hook_before_others(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register ``hook`` so that it runs before hooks on ``tensor`` that are not ours, which may compute with weights.

    A tensor's hooks run in the order of their table, which is that of registration, before the prehooks of its node.
    There is no option to prepend one, so the others are taken out and put back. Ours keep their order: a unit may
    return the output of another.
    """
    table, _ = gradient_hook_tables(tensor)
    others = {} if table is None else {key: one for key, one in table.items() if not _is_ours(one)}
    for key in others:
        del table[key]  # type: ignore[union-attr]  # it has entries
    tensor.register_hook(hook)
    if table is not None:
        table.update(others)


def _is_ours(hook: Callable[..., Any]) -> bool:
    """Return whether the package defines ``hook``. Bound methods of ours take no attribute as a mark."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


class _BackwardStarts(torch.autograd.Function):
    """Copies a tensor and its tangent. Its backward calls ``starting`` first.

    A copy, because autograd lets nobody write to what a function returns of its own argument.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(starting: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's are untyped
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.starting = inputs[0]

    @staticmethod
    @skipped_by_dynamo
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]  # torch's are untyped
        ctx.starting(grad)
        if torch.is_grad_enabled() and functorch_active():
            grad = _BackwardLeaves.apply(ctx.starting, grad)
        return None, grad

    @staticmethod
    def jvp(ctx: Any, starting: None, tangent: torch.Tensor | None) -> Any:  # type: ignore[override]  # torch's are untyped
        return None if tangent is None else _BackwardStarts.apply(ctx.starting, tangent)


class _BackwardLeaves(torch.autograd.Function):
    """The identity on a gradient of a module's output. A second backward leaves the module in its backward.

    This is ``watch_exit`` inside a transform of ``torch.func``: hooks on the gradient see no second backward that runs
    in another transform.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(starting: Callable[[torch.Tensor], None], grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's are untyped
        return grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.starting = inputs[0]

    @staticmethod
    @skipped_by_dynamo
    def backward(ctx: Any, outgoing: torch.Tensor) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]  # torch's are untyped
        return None, _watch_entry(outgoing, ctx.starting)

    @staticmethod
    def jvp(ctx: Any, starting: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's are untyped
        return tangent
