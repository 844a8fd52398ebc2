"""The graph of autograd and the backward that runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable

__all__ = [
    "accumulate_grad_node",
    "autograd_sequence_number",
    "explicit_grad_dtype",
    "functorch_active",
    "gradient_hooks",
    "graph_task_id",
    "have_gradient_hooks",
    "node_sequence_number",
    "profiler_running",
    "queue_end_of_backward",
    "view_base",
    "will_accumulate",
    "without_functorch",
]

# The id of the running backward, -1 outside: a forward hook that fires inside one is a recomputation.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Nodes created from now on have at least this number: tells a view made inside a module from a view of its input.
autograd_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def node_sequence_number(node: Any) -> int:
    """The creation number of an autograd node."""
    return node._sequence_nr()


# Runs a function when the running backward is done (torch's engine has no public way to ask for it).
queue_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]  # its C class has no stub


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the running backward will add to ``leaf.grad``; its hooks run then.

    The engine refuses to say so of a leaf that ``torch.autograd.grad`` was asked for: nothing is accumulated there.
    """
    try:
        return torch._C._will_engine_execute_node(accumulate_grad_node(leaf))
    except RuntimeError:
        return False


# Whether torch knows that a gradient's dtype was chosen (2.15).
_FLAGGED: bool = hasattr(torch.Tensor, "_has_grad_dtype_override")


def explicit_grad_dtype(param: torch.Tensor) -> tuple[torch.dtype | None, ...]:
    """The ``grad_dtype`` that was set on ``param``, which may be None (any), in a tuple; () if none was.

    Before torch 2.15 one that equals the parameter's dtype cannot be told from the default.
    """
    with torch._C.DisableTorchFunctionSubclass():  # not every subclass knows what it is asked
        dtype = param.grad_dtype
        chosen = param._has_grad_dtype_override if _FLAGGED else dtype != param.dtype  # type: ignore[attr-defined]  # since torch 2.15
    return (dtype,) if chosen else ()


def accumulate_grad_node(leaf: torch.Tensor) -> Any:
    """The autograd node that adds to ``leaf.grad``; it runs on the stream that it was made on, so it is not kept."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # a view has one


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]] | None:
    """The hooks of ``register_hook`` and those of ``register_post_accumulate_grad_hook``; None if there is neither.

    Autograd never sees a shard, so fsdp2 runs the hooks on its reduced gradient.
    """
    on_gradient, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if not on_gradient and not after:
        return None
    return list((on_gradient or {}).values()), list((after or {}).values())


def have_gradient_hooks(tensors: Iterable[Any]) -> bool:
    """Whether any of ``tensors`` has such hooks; one pass in Python over what may be thousands."""
    return any([tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in tensors])


# The tensor that one is a view of, or None; changing a view in place goes through its base in autograd.
view_base: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


# Whether a transform of torch.func runs; tensors are wrapped then, and say wrongly that they need no gradient.
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Its transforms are off in a block of this, so that tensors made there are plain ones.
without_functorch: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch

# Profiler ranges cost microseconds each, so they are only opened while a profiler runs.
profiler_running: Callable[[], bool] = torch.autograd._profiler_enabled
