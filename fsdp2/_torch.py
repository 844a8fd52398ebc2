"""Every private torch symbol fsdp2 leans on, each with the reason; tests/unit/test_torch.py probes them one by one.

Nothing else in the package may import a private torch name, so that a new torch that moves one fails here, loudly.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

# install() routes what torch's test helpers replace in this module.
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group_module
from torch import nn
from torch.autograd import Variable

# The state of a composable API lives on the module under this key; `fully_shard.state(module)` reads it there, and
# `replicate` and torch's own fully_shard read the registry to refuse a module that is already managed.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# Libraries find the state of a module through this mapping; it keeps weak references, hence the class to derive from.
from torch.distributed._composable_state import _get_module_state as composable_state
from torch.distributed._composable_state import _insert_module_state as insert_composable_state
from torch.distributed._composable_state import _State as ComposableState

# A gradient that tensor parallelism is still communicating; it must be waited for before it is packed.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

# The public collectives spend more time in Python on checks than a small collective takes; a group's methods do not.
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

# What ranks tell each other beside their collectives goes through the store the process group was made with.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# Buffers from a process group's allocator or from symmetric memory; torch's own collectives for them serve as they are.
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common

# The interfaces of set_custom_all_gather and set_custom_reduce_scatter; torch exports them nowhere public.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)

# The phase and residency of a group under the names by which torch's test helpers and trackers ask for them.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

# To tell a module that torch's own fully_shard manages, which must not be mixed with ours in one tree.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState
from torch.distributed.tensor import DTensor

# The sharded parameter is a DTensor built from a local tensor without communication or autograd.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# A dimension that tensor parallelism cut before data parallelism: its shards interleave, which this placement states.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Grouped calls manage the root-most modules of the list, by torch's definition of root-most.
from torch.distributed.utils import _get_root_modules as root_modules

# User-registered containers are walked the way torch walks them.
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "TORCH_COMMS",
    "AllGather",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "AsyncCollectiveTensor",
    "ComposableState",
    "DTensorSpec",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "ReduceScatter",
    "ReduceScatterOptions",
    "RegistryItem",
    "ShardedState",
    "StridedShard",
    "SymmMemAllGather",
    "SymmMemReduceScatter",
    "TensorMeta",
    "TorchDataParallelMeshDims",
    "TorchFSDPState",
    "TorchShardPlacementResult",
    "TrainingState",
    "accumulate_grad_node",
    "around_init_group",
    "autograd_sequence_number",
    "check_finite_and_unscale",
    "chunk_cat",
    "composable_state",
    "concatenate_meshes",
    "default_store",
    "dtensor_from_local",
    "dtensor_spec",
    "dtensor_specs",
    "dynamo_is_tracing",
    "flatten_mesh",
    "foreach_copy",
    "foreach_mul",
    "foreach_norm",
    "functorch_active",
    "gradient_hooks",
    "graph_task_id",
    "group_all_gather",
    "group_all_gather_coalesced",
    "group_all_reduce",
    "group_all_to_all",
    "group_reduce_scatter",
    "insert_composable_state",
    "loads_as_torch_does",
    "local_tensor",
    "local_tensors",
    "node_sequence_number",
    "non_persistent_buffers",
    "outside_dynamo",
    "outside_functorch",
    "overrides_setattr",
    "profiler_running",
    "put_first_after_step",
    "python_attributes",
    "pytree",
    "queue_end_of_backward",
    "root_modules",
    "run_policy",
    "set_local_tensor",
    "torch_fully_shard",
    "torch_group_module",
    "version_of",
    "view_base",
    "will_execute",
]

# Newer than torch 2.11, where there is nothing to be mixed up with them: symmetric memory for collectives, what code
# written for torch's fully_shard returns from shard_placement_fn (ours is built from a DeviceMesh), and names for the
# data-parallel dimensions of a mesh.
SymmMemAllGather: Any = getattr(_fsdp_collectives, "SymmMemAllGather", None)
SymmMemReduceScatter: Any = getattr(_fsdp_collectives, "SymmMemReduceScatter", None)
TorchShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
TorchDataParallelMeshDims: Any = getattr(torch_fsdp, "DataParallelMeshDims", None)


# Asked of the group itself, not of its class: a group written in Python (torch's threaded one, fault-tolerant ones)
# overrides these methods, and the class's own would pass it by. torch 2.13 renamed all but the last.
def _group_method(name: str, before: str) -> Callable[..., Any]:
    name = name if hasattr(dist.ProcessGroup, name) else before

    def call(group: dist.ProcessGroup, *args: Any) -> Any:
        return getattr(group, name)(*args)

    return call


group_all_gather = _group_method("all_gather_single", "_allgather_base")
group_all_gather_coalesced = _group_method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
group_reduce_scatter = _group_method("reduce_scatter_single", "_reduce_scatter_base")
group_all_to_all = _group_method("all_to_all_single", "alltoall_base")
group_all_reduce = _group_method("allreduce", "allreduce")

# The function under whose name torch keeps a module's state; taken now, since install() replaces the public one.
torch_fully_shard: Callable[..., Any] = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # contract() made it

_comms = (ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter, SymmMemAllGather, SymmMemReduceScatter)
TORCH_COMMS = tuple(comm for comm in _comms if comm is not None)

# The id of the running backward, -1 outside: a forward hook that fires inside one is a recomputation.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Nodes created from now on have at least this number: tells a view made inside a module from a view of its input.
autograd_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Profiler ranges cost microseconds each, so they are only opened while a profiler runs.
profiler_running: Callable[[], bool] = torch.autograd._profiler_enabled


# One kernel packs gradients into one row per rank, padded and cast.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat

# One kernel unscales a list of gradients and notes whether one is not finite; what torch.amp.GradScaler itself calls.
check_finite_and_unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_

# One call copies (and casts) a whole list of tensors; there is no public form of it.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_

# The same for norms and for scaling in place, which clipping is made of.
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
foreach_mul: Callable[[list[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_


_M = TypeVar("_M", bound=Callable[..., Any])


def node_sequence_number(node: Any) -> int:
    """The creation number of an autograd node."""
    return node._sequence_nr()


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward is done (torch's engine has no public way to ask for it)."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]  # its C class has no stub


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of all: data-parallel ones outside tensor-parallel ones, as DTensor expects."""
    return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A 1D mesh over all ranks of ``mesh``, for data parallelism over several of its dimensions."""
    return mesh._flatten(name)


def will_execute(node: Any) -> bool:
    """Whether the running backward will accumulate into the leaf of ``node``, whose hooks then run.

    The engine refuses to say so of a leaf that ``torch.autograd.grad`` was asked for: nothing is accumulated there.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def accumulate_grad_node(leaf: torch.Tensor) -> Any:
    """The autograd node that adds to ``leaf.grad``."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # a view has one


def dtensor_from_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around ``local`` itself; ``DTensor.from_local`` would make a view and check it on every call."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_tensor(dtensor: Any) -> torch.Tensor:
    """The local tensor object of a DTensor; ``to_local`` would go through autograd and make a view."""
    return dtensor._local_tensor


def local_tensors(tensors: Iterable[Any]) -> list[Any]:
    """The local tensor of each DTensor, the rest as it is; one pass in Python over what may be thousands."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def dtensor_specs(tensors: Iterable[Any]) -> list[DTensorSpec | None]:
    """The spec of each DTensor, None for the rest; one pass in Python over what may be thousands."""
    return [t._spec if isinstance(t, DTensor) else None for t in tensors]


def set_local_tensor(dtensor: Any, local: torch.Tensor, spec: DTensorSpec | None = None) -> None:
    """Let a DTensor keep its identity while its local tensor moves into another buffer; ``spec`` equals its own."""
    dtensor._local_tensor, dtensor._spec = local, spec or dtensor._spec


def dtensor_spec(dtensor: Any) -> DTensorSpec:
    """The spec of a DTensor; ``Module.to`` changes its dtype."""
    return dtensor._spec


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]] | None:
    """The hooks of ``register_hook`` and those of ``register_post_accumulate_grad_hook``; None if there is neither.

    Autograd never sees a shard, so fsdp2 runs the hooks on its reduced gradient.
    """
    on_gradient, after = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    if not on_gradient and not after:
        return None
    return list((on_gradient or {}).values()), list((after or {}).values())


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a view of; changing a view in place goes through its base in autograd."""
    return tensor._base


def version_of(tensor: Any) -> int:
    """How often ``tensor`` was changed in place; -1 for inference tensors, which do not count."""
    return -1 if tensor.is_inference() else tensor._version


def run_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]] | None:
    """What a ModuleWrapPolicy or CustomPolicy matches in ``root``, each with its arguments; None for anything else."""
    return policy._run_policy(root, ignored, {}) if hasattr(policy, "_run_policy") else None


def python_attributes(param: torch.Tensor) -> dict[str, Any]:
    """What users stored on ``param``, without what tensor subclasses keep there to be tensors."""
    if type(param) is nn.Parameter:
        return dict(param.__dict__)
    inner = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    own = {"_spec", "_is_param", *inner}
    return {name: value for name, value in param.__dict__.items() if name not in own}


# Whether a transform of torch.func runs; tensors are wrapped then, and say wrongly that they need no gradient.
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def outside_functorch(method: _M) -> _M:
    """``method`` with functorch transforms off while it runs: they wrap tensors, and storages are resized here."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not functorch_active():
            return method(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]  # wraps() hides that the signature is method's


def outside_dynamo(method: _M) -> _M:
    """``method`` with compilation off while it runs: torch.compile breaks its graph there instead of tracing hooks.

    Dynamo is not imported for it. Where nobody compiles, a call costs one look at ``sys.modules``.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(method, recursive=True, reason="fsdp2's hooks are not compiled"))
            dynamo.eval_frame.skip_code(run.__code__)  # type: ignore[attr-defined]  # wraps() hides that it is a function
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's mark, on a function
    return run  # type: ignore[return-value]  # wraps() hides that the signature is method's


def dynamo_is_tracing() -> bool:
    """Whether Dynamo runs this function while it traces: it takes tensors it has not seen for constants."""
    return "torch._dynamo" in sys.modules and torch._guards.TracingContext.try_get() is not None


def around_init_group(
    optimizer: torch.optim.Optimizer,
    around: Callable[[Callable[[], Any], dict[str, Any], tuple[list[Any], ...]], Any],
) -> None:
    """Let ``around(collect, group, lists)`` fill the lists with a group's tensors in each step of torch's optimizer.

    All of torch's do that in this method: parameters with a gradient, gradients, then one list for each kind of state.
    ``collect()`` does it their way; what it returns must be returned. What the lists hold in the end is what the step
    computes with; the optimizer itself keeps what it has. A copy of the optimizer does without ``around``. A compiled
    step breaks here, or calls it while it is traced (torch before 2.15).
    """
    own, reference = type(optimizer)._init_group, weakref.ref(optimizer)  # type: ignore[attr-defined]  # not in Optimizer

    @outside_dynamo
    @functools.wraps(own)
    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        return around(lambda: own(reference(), group, *lists), group, lists)

    optimizer._init_group = init_group  # type: ignore[attr-defined]  # as above


def put_first_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Move a hook after the step ahead of those that were registered before it; torch can only append one."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # a plain dict in the stubs


def overrides_setattr(module: nn.Module) -> bool:
    """Whether the class watches its attributes (nn.LSTM keeps a list of its weights), so ``setattr`` must be used."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def loads_as_torch_does(module: nn.Module) -> bool:
    """Whether what ``load_state_dict`` gives ``module`` is loaded as it is: no code but torch's and ours sees it first.

    Such code may rename or reshape what it is given, so its module's state dict cannot be judged beforehand.
    """
    if not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
        return False
    known = ("fsdp2.", "torch.distributed.algorithms._checkpoint.")
    return all(getattr(h, "__module__", "").startswith(known) for h in module._load_state_dict_pre_hooks.values())
