"""Values that a caller hands in for loading, and that lie in memory which loading frees, or which is gone already.

A forward whose backward has not run leaves pieces on a few ranks (``reshard_after_forward=2``) or full parameters on
its modules, and torch.distributed.checkpoint.state_dict reads them there, writes new values into them, and loads those.
The process used to end with SIGSEGV: the pieces' memory was freed before they were read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2
from tests.support import api
from tests.support.parity import full, mesh_1d, shard_each, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FROM_SOME = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def build(**options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a sharded model, and new values for it."""
    torch.manual_seed(3)
    module = stack()
    values = {name: value + 1 for name, value in module.state_dict().items()}
    shard_each(module, fsdp2, mesh=mesh_1d(), **options)
    return module, values


def unshard(module: Any) -> None:
    """Show full parameters everywhere."""
    for unit in (*module, module):
        unit.unshard()


def reshard(module: Any) -> None:
    """Show shards everywhere."""
    for unit in (*module, module):
        unit.reshard()


def assert_holds(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Assert that the shards have these values, and that a forward computes with them."""
    plain = stack()
    plain.load_state_dict(values)
    rows = torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(module(rows), plain(rows))
    reshard(module)
    for name, param in module.named_parameters():
        assert torch.equal(full(param), values[name]), name


@on_ranks(4)
@pytest.mark.parametrize("options", [FROM_RANK0, StateDictOptions(full_state_dict=True)], ids=["from_rank0", "all"])
def test_pieces_that_torch_writes_to(rank, world, options):
    """The new values are written into the pieces that the modules show, which loading frees."""
    module, values = build(reshard_after_forward=2)
    module(torch.ones(2, 8))
    set_model_state_dict(module, dict(values) if rank == 0 or options is not FROM_RANK0 else {}, options=options)
    assert_holds(module, values)


@on_ranks(4)
def test_rounded_pieces(rank, world):
    """Pieces are in the dtype of computation, so what torch writes to them is rounded: every rank raises, nothing is
    loaded, and the remedy works."""
    module, values = build(reshard_after_forward=2, mp_policy=LOW)
    before = {name: full(param) for name, param in module.named_parameters()}
    module(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"0\.weight: got what the module computes with.*Call reshard\(\) on every"):
        set_model_state_dict(module, dict(values) if rank == 0 else {}, options=FROM_RANK0)
    reshard(module)
    for name, param in module.named_parameters():
        assert torch.equal(full(param), before[name]), name
    set_model_state_dict(module, dict(values) if rank == 0 else {}, options=FROM_RANK0)
    for name, param in module.named_parameters():
        assert torch.equal(full(param), values[name]), name


@on_ranks(2)
@pytest.mark.parametrize("low", [False, True])
def test_keys_that_are_left_out(rank, world, low):
    """torch loads the full parameter itself for a key that rank 0 lacks. It is freed, and rounded in low precision."""
    module, values = build(**({"mp_policy": LOW} if low else {}))
    old = full(module[1].weight)
    unshard(module)
    some = {name: value for name, value in values.items() if name != "1.weight"}
    if low:
        with pytest.raises(RuntimeError, match=r"1\.weight: got what the module computes with"):
            set_model_state_dict(module, dict(some) if rank == 0 else {}, options=FROM_SOME)
        reshard(module)
    set_model_state_dict(module, dict(some) if rank == 0 else {}, options=FROM_SOME)
    reshard(module)
    for name, param in module.named_parameters():
        assert torch.equal(full(param), old if name == "1.weight" else values[name]), name


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "assign", "part", "broadcast_from_rank0"])
def test_full_parameters(rank, world, how, views):
    """What is read off an unsharded module may be loaded into it."""
    module, _ = build()
    values = {name: full(param) for name, param in module.named_parameters()}
    unshard(module)
    handed: Any = {name: param.detach() if views else param for name, param in module.named_parameters()}
    if how == "broadcast_from_rank0":
        fsdp2.broadcast_from_rank0(module, handed)
    elif how == "part":
        module[1].load_state_dict({name: handed[f"1.{name}"] for name in ("weight", "bias")})
    else:
        module.load_state_dict(handed, assign=how == "assign")
    assert_holds(module, values)


@on_ranks(2)
def test_memory_that_is_gone(rank, world):
    """What was read off before ``reshard()`` has no memory: an error on every rank names it, and nothing is loaded."""
    module, values = build()
    before = {name: full(param) for name, param in module.named_parameters()}
    unshard(module)
    gone = module[2].bias.detach()
    kept = module[2].bias.detach().clone()
    reshard(module)
    for load in (module.load_state_dict, lambda state: fsdp2.broadcast_from_rank0(module, state)):
        with pytest.raises((RuntimeError, ValueError), match=r"2\.bias.*its memory was freed.*Call clone\(\)"):
            load({**values, "2.bias": gone})
        for name, param in module.named_parameters():
            assert torch.equal(full(param), before[name]), name
    module.load_state_dict({**values, "2.bias": kept})
    assert torch.equal(full(module[2].bias), kept)


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_dict_that_was_assigned_once(rank, world, whole):
    """torch marks it in ``_metadata`` and assigns it from then on, on the rank that has it; others copy in place.

    Ranks are in one state all the same: they launch the same collectives, and the same optimizer goes on training.
    """
    torch.manual_seed(3)
    first = stack()
    state = first.state_dict()
    if rank == 0:
        stack().load_state_dict(state, assign=True)
    values = {name: value.clone() for name, value in state.items()}
    if whole:
        torch.manual_seed(5)
        module: Any = stack()
        fsdp2.fully_shard(module, mesh=mesh_1d())
    else:
        module, _ = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.unshard()
    set_model_state_dict(module, state if rank == 0 else {}, options=FROM_RANK0)
    for _ in range(2):
        module(torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 8))
    module.reshard()
    grads = {name: full(param.grad) for name, param in module.named_parameters()}
    optimizer.step()
    for name, param in module.named_parameters():
        assert torch.equal(full(param), values[name] - grads[name]), name


@on_ranks(2)
@pytest.mark.parametrize("gone", [False, True])
def test_a_parameter_that_is_assigned(rank, world, gone):
    """A module that is given a parameter on memory of full parameters: the value is taken, or its loss is named."""
    module, _ = build()
    values = {name: full(param) for name, param in module.named_parameters()}
    unshard(module)
    view = module[1].weight.detach()
    if gone:
        reshard(module)
    module[1].weight = nn.Parameter(view)
    if gone:
        with pytest.raises(RuntimeError, match=r"1\.weight: replaced on its module, but its memory was freed.*clone"):
            module(torch.ones(2, 8))
        module[1].weight = nn.Parameter(values["1.weight"].clone())
    module(torch.ones(2, 8))
    assert_holds(module, values)
