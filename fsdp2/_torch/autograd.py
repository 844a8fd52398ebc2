"""Autograd's graph, and the running backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

# The transforms of torch.func refuse requires_grad_ in the whole thread; nothing public allows it for a while.
from torch._C import _functorch
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import get_gradient_edge

__all__ = [
    "autograd_sequence_number",
    "entries_from_elsewhere",
    "explicit_grad_dtype",
    "functorch_active",
    "gradient_hook_tables",
    "gradient_hooks",
    "graph_task_id",
    "have_gradient_hooks",
    "hooks_of_saved_tensors",
    "in_each_transform",
    "is_made_since",
    "lasting_tensors",
    "needs_gradient",
    "profiler_running",
    "queue_end_of_backward",
    "share_gradient_hooks",
    "tangents_of",
    "view_base",
    "will_accumulate",
    "without_functorch",
]

# The id of the running backward, -1 outside of one. A forward hook that runs inside a backward is a recomputation.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Nodes created from now on have at least this number. It tells a view made inside a module from a view of its input.
autograd_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def is_made_since(node: Any, since: int) -> bool:
    """Return True if ``node`` is an autograd node that was made at or after the sequence number ``since``."""
    return node is not None and node._sequence_nr() >= since


def entries_from_elsewhere(tensor: torch.Tensor, device: torch.device, since: int) -> list[tuple[Any, int]]:
    """Return the nodes by which backward comes to ``device`` on its way from ``tensor``, which lies elsewhere.

    Each has the number of its output. They were made at or after the sequence number ``since``.
    """
    found: list[tuple[Any, int]] = []
    seen: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while waiting:
        node, output = waiting.pop()
        # The node of a leaf lasts longer than the graph, and needs no parameter.
        if not is_made_since(node, since) or hasattr(node, "variable") or (node, output) in seen:
            continue
        seen.add((node, output))
        if _device_of(node) in (device, None):
            found.append((node, output))
        else:
            waiting += node.next_functions
    return found


def _device_of(node: Any) -> torch.device | None:
    """Return the device whose thread runs ``node``: that of its first output. None if torch does not tell."""
    try:
        return node._input_metadata[0].device  # type: ignore[no-any-return]  # nodes have no stub
    except RuntimeError:  # torch 2.11 has no such attribute on the node of an autograd.Function
        return None


# Runs a function at the end of the running backward. torch's engine has no public function for it.
queue_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]  # its C class has no stub


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Return True if the running backward will add to ``leaf.grad``, which runs its hooks.

    The engine raises an error for an input of ``torch.autograd.grad``, where nothing is accumulated. A transform of
    ``torch.func`` that runs this backward would hide the node of ``leaf``, which is no tensor of its.
    """
    try:
        with without_functorch():
            return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return False


# True if torch records that Tensor.grad_dtype was set (since 2.15).
_FLAGGED: bool = hasattr(torch.Tensor, "_has_grad_dtype_override")


def explicit_grad_dtype(param: torch.Tensor) -> tuple[torch.dtype | None, ...]:
    """Return the ``grad_dtype`` that was set on ``param`` in a tuple; None in it means any dtype. () if none was set.

    Before torch 2.15, a value that equals the parameter's dtype cannot be told from the default.
    """
    with torch._C.DisableTorchFunctionSubclass():  # not every subclass implements these attributes
        dtype = param.grad_dtype
        chosen = param._has_grad_dtype_override if _FLAGGED else dtype != param.dtype  # type: ignore[attr-defined]  # since torch 2.15
    return (dtype,) if chosen else ()


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]] | None:
    """Return the hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook``, or None if there are none.

    Shards take no part in autograd, so fsdp2 runs their hooks on the reduced gradient.
    """
    on_gradient, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if not on_gradient and not after:
        return None
    return list((on_gradient or {}).values()), list((after or {}).values())


HookTables = tuple[dict[int, Callable[..., Any]] | None, dict[int, Callable[..., Any]] | None]
"""Where a tensor keeps its gradient hooks and its post-accumulate hooks, by the ids that their handles have."""


def gradient_hook_tables(tensor: torch.Tensor) -> HookTables:
    """Return the tables in which ``tensor`` keeps such hooks; None for one without any."""
    return tensor._backward_hooks or None, tensor._post_accumulate_grad_hooks or None


def share_gradient_hooks(tensor: torch.Tensor, tables: HookTables) -> None:
    """Let ``tensor`` have the hooks in ``tables``, those of another tensor, also where it is frozen.

    It shares the tables instead of copying the hooks, because a user's handle removes a hook from its table.
    """
    on_gradient, after = tables
    if on_gradient is not None:
        tensor._backward_hooks = on_gradient
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def have_gradient_hooks(tensors: Iterable[Any]) -> bool:
    """Return True if any of ``tensors`` has such hooks; fast for thousands of tensors."""
    return any([tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in tensors])


def hooks_of_saved_tensors() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the hooks of the innermost ``torch.autograd.graph.saved_tensors_hooks``: pack and unpack; None outside."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# The base of a view, or None. Autograd records an in-place change of a view on its base.
view_base: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


# True while a transform of torch.func runs. Tensors are then wrapped, and their requires_grad is wrongly False.
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def in_each_transform(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor`` and what the transforms of ``torch.func`` around it see in its place, the innermost first."""
    found = [tensor]
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        found.append(tensor)
    return found


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` requires a gradient, in the innermost transform of ``torch.func`` or around it."""
    return tensor.requires_grad or any([one.requires_grad for one in in_each_transform(tensor)])


# A context that disables these transforms, so that tensors made in it are plain.
without_functorch: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make tensors that outlive the call in which they are made: the modes of that call must leave no mark on them.

    They are no inference tensors, no wrappers of ``torch.func``, which have no storage, and have no graph. They may be
    parameters: DTensors become that by ``requires_grad_``, which the transforms refuse even while they are disabled.
    """
    allowed = _functorch.get_inplace_requires_grad_allowed()
    with torch.inference_mode(False), torch.no_grad(), without_functorch():
        _functorch.set_inplace_requires_grad_allowed(True)
        try:
            yield
        finally:
            _functorch.set_inplace_requires_grad_allowed(allowed)


def tangents_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tangents of dual numbers among ``tensors``. A tangent has a graph of its own.

    There are none inside transforms of ``torch.func``, which wrap both in one tensor. The level is private, and spares
    a call for each tensor outside of ``torch.autograd.forward_ad.dual_level``.
    """
    if forward_ad._current_level < 0 or functorch_active():
        return []
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]
    return [tangent for tangent in tangents if tangent is not None]


# True while a profiler runs. Profiler ranges cost microseconds each, so they are opened only then.
profiler_running: Callable[[], bool] = torch.autograd._profiler_enabled
