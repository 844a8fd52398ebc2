"""Models of every kind under every kind of sharding, values to load into them, and whether these arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from float8_linear import use_float8
from tests.support.cases import CASES, PARAMETERS
from tests.support.models import Transformer, mlp
from tests.support.parity import full, fulls, mesh_1d, mesh_2d, on_one_axis, on_two_axes, shard_each

CASE_NAMES = (
    *("mlp", "mlp_root_only", "mlp_grouped", "transformer", "transformer_grouped", "used_several_times"),
    *(name for name in PARAMETERS if name != "no_parameters"),
)

INT8 = fsdp2.CompressionPolicy(torch.int8, block=16, min_numel=16)


def values_of(module: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    """Return the state dict of a plain module with new values everywhere, tied ones the same tensor."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in made:
            fresh = torch.randint(-50, 50, value.shape, generator=generator).to(value.dtype)
            made[id(value)] = fresh if not value.is_floating_point() else (fresh / 70).to(value.dtype)
        made[name] = made[id(value)]
    return {name: value for name, value in made.items() if isinstance(name, str)}


def plain(name: str) -> nn.Module:
    """Return the unsharded model of a kind."""
    if name in CASES:
        torch.manual_seed(5)
        return CASES[name].build()
    return SHARDED[name][0]()


def sharded(name: str, *, meta: bool, values: Mapping[str, Tensor] | None = None) -> Any:
    """Return the model of a kind, sharded, with these values; with ``meta`` parameters and buffers have no memory."""
    with torch.device("meta" if meta else "cpu"):
        module = plain(name)
    if values is not None:
        module.load_state_dict(values)
    if name in CASES:
        for unit in [*CASES[name].units(module), module]:
            fsdp2.fully_shard(unit, mesh=mesh_1d())
    else:
        SHARDED[name][1](module)
    return module


def last_dim(parameter: nn.Parameter) -> Shard:
    """Cut the last dimension."""
    return Shard(max(parameter.ndim - 1, 0))


def with_ignored(module: Any) -> None:
    """Leave two parameters whole, one of them in the root."""
    ignored = {module[0].weight, module[2].bias}
    on_one_axis(module, fsdp2, ignored_params=ignored)


def beside_another(module: Any) -> None:
    """Leave a DTensor of another parallelism as it is."""
    bias = nn.Parameter(distribute_tensor(module[2].bias.detach(), mesh_1d(), [Shard(0)]))
    module[2].bias = bias
    on_one_axis(module, fsdp2, ignored_params={bias})


def with_replicated(module: Any) -> None:
    """Let fsdp2 keep two parameters whole."""
    fsdp2.fully_shard(module, mesh=mesh_1d(), replicated_params={module[0].weight, module[2].bias})


def sent_as_float8(module: Any) -> None:
    """Let weights be of a class that says what is sent of them."""
    use_float8(module)
    on_one_axis(module, fsdp2)


def over_tensor_parallelism(module: Any, **options: Any) -> None:
    """Columns, rows, and a replicated layer, cut over data parallelism as well."""
    mesh = mesh_2d("dp", "tp")
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard_each(module, fsdp2, mesh=mesh["dp"], **options)


def checkpointed(module: Any) -> None:
    """Wrap one block before and one after sharding."""
    module.blocks[0] = checkpoint_wrapper(module.blocks[0])
    for block in module.blocks:
        fsdp2.fully_shard(block, mesh=mesh_1d())
    module.blocks[1] = checkpoint_wrapper(module.blocks[1])
    fsdp2.fully_shard(module, mesh=mesh_1d())


def compiled(module: Any) -> None:
    """Put a compiled child (not run) in a module."""
    for index, child in enumerate(module):
        if isinstance(child, nn.Linear):
            module[index] = torch.compile(child, backend="eager")
    fsdp2.fully_shard(module, mesh=mesh_1d())


def linears(*widths: int) -> Callable[[], nn.Module]:
    """Return a maker of linear layers in a row."""
    return lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


SHARDED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "last_dim": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)),
        lambda m: on_one_axis(m, fsdp2, shard_placement_fn=last_dim),
    ),
    "hybrid": (linears(5, 3, 1, 8), lambda m: on_two_axes(m, fsdp2)),
    "over_replicas": (linears(5, 3, 1, 8), lambda m: on_two_axes(m, fsdp2, shard_over_replicas=True)),
    "direct": (
        linears(5, 7, 3),
        lambda m: (
            on_one_axis(m, fsdp2),
            m.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0, chunk_bytes=1),
        ),
    ),
    "offloaded": (linears(5, 7, 3), lambda m: on_one_axis(m, fsdp2, offload_policy=CPUOffloadPolicy())),
    "half": (linears(5, 7, 3), lambda m: on_one_axis(m, fsdp2, mp_policy=MixedPrecisionPolicy(torch.bfloat16))),
    "compressed": (linears(16, 16, 8), lambda m: on_one_axis(m, fsdp2, compression=INT8)),
    "float8": (linears(5, 7, 3), sent_as_float8),
    "ignored": (lambda: mlp(4, 5, 3), with_ignored),
    "beside_another": (lambda: mlp(4, 5, 3), beside_another),
    "replicated": (lambda: mlp(4, 5, 3), with_replicated),
    "parent_not_sharded": (linears(5, 7, 3), lambda m: fsdp2.fully_shard(m[0], mesh=mesh_1d())),
    "checkpointed": (Transformer, checkpointed),
    "compiled": (lambda: mlp(4, 5, 3), compiled),
    "tensor_parallel": (linears(8, 6, 5, 8), over_tensor_parallelism),
    "tensor_parallel_uneven": (linears(7, 5, 3, 9), over_tensor_parallelism),
    "tensor_parallel_last_dim": (
        linears(8, 6, 5, 8),
        lambda m: over_tensor_parallelism(m, shard_placement_fn=last_dim),
    ),
    "subgroup": (linears(8, 6, 5), lambda m: on_one_axis(m, fsdp2, reshard_after_forward=2)),
}
"""Kinds of their own: how to build and how to shard the model."""
NEED_FOUR = (
    *("hybrid", "over_replicas", "subgroup"),
    *("tensor_parallel", "tensor_parallel_uneven", "tensor_parallel_last_dim"),
)
"""Kinds for four ranks only."""
KINDS = (*CASE_NAMES, *(name for name in SHARDED if name not in NEED_FOUR))
"""Kinds for any number of ranks."""


def cleaned(name: str) -> str:
    """Return a name without what wrappers add."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def assert_holds(module: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Assert that a module holds exactly these values, and nothing on the meta device."""
    state = {cleaned(name): value for name, value in module.state_dict(keep_vars=True).items()}
    assert list(state) == list(expected)
    found = fulls(state)
    for name, value in found.items():
        assert not state[name].is_meta and not value.is_meta, name
        assert value.dtype == state[name].dtype and value.shape == expected[name].shape, name
        assert torch.equal(value, expected[name].to(value.dtype)), name


def once(values):
    """Return the values without second names of the same tensor, which the library refuses to write."""
    seen, kept = set(), {}
    for name, value in values.items():
        if id(value) not in seen:
            seen.add(id(value))
            kept[name] = value.contiguous()
    return kept


def write(path, values, rank):
    """Let rank 0 write a file with the library."""
    if rank == 0:
        save_file(once(values), path, metadata={"format": "pt"})
    dist.barrier()


def load_new(name, path, values, *, meta):
    """Load a fresh sharded model and check it."""
    module = sharded(name, meta=meta)
    assert fsdp2.load_safetensors(module, path) == ([], [])
    assert_holds(module, values)
    return module


def assert_refused(kind, text, module, values, rank, **options):
    """Assert that every rank raises, with these words, and that nothing changed."""
    before = {name: full(value).clone() for name, value in module.state_dict().items() if not value.is_meta}
    metas = [name for name, value in module.state_dict().items() if value.is_meta]
    with pytest.raises(kind, match=text):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, **options)
    after = module.state_dict()
    assert metas == [name for name, value in after.items() if value.is_meta]
    assert all(torch.equal(full(after[name]), value) for name, value in before.items())
