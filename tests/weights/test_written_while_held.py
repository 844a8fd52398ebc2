"""Shards that are written while full parameters, pieces or portions made of them are in memory.

Loaders write in place to the tensors that ``state_dict()`` hands out, and those have version counters of their own. A
rank whose piece is empty has nothing to write to. So whether memory still is that of the shards does not show in the
counters of the parameters, and not alike on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fsdp2
from tests.support import api
from tests.support.parity import SEED, assert_gradients, beside_one_process, mesh_2d, stack
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks

pytestmark = api.fsdp2_only
INPUTS = torch.ones(2, 8)

# ---- what holds memory ----


def hold_by_hand(module: Any) -> None:
    module.unshard()
    for layer in module:
        layer.unshard()


def hold_after_backward(module: Any) -> None:
    module.set_reshard_after_backward(False)
    module(INPUTS).sum().backward()
    module.zero_grad()


def hold_after_forward(module: Any) -> None:
    module.set_reshard_after_forward(False)
    module(INPUTS)


def hold_pieces(module: Any) -> None:
    module(INPUTS)


HOLDS = {hold.__name__: hold for hold in (hold_by_hand, hold_after_backward, hold_after_forward, hold_pieces)}

# ---- what loads whole values ----


def from_files(module: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    if torch.distributed.get_rank() == 0:
        save_file(values, folder / "model.safetensors")
    torch.distributed.barrier()
    fsdp2.load_safetensors(module, folder)


def from_rank0(module: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    fsdp2.broadcast_from_rank0(module, values if torch.distributed.get_rank() == 0 else None)


def from_rank0_by_torch(module: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, values if torch.distributed.get_rank() == 0 else {}, options=options)


def into_summoned(module: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    with fsdp2.summon_full_params(module, writeback=True), torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


def whole_by_load_state_dict(module: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    module.load_state_dict(values)


LOADS = {
    load.__name__: load
    for load in (from_files, from_rank0, from_rank0_by_torch, into_summoned, whole_by_load_state_dict)
}

# ---- what writes ----


def by_checkpoint(module: Any, shards: list[Any], folder: Path) -> None:
    """A checkpoint, which was saved before, is read into the state dict."""
    dcp.load({"model": module.state_dict()}, checkpoint_id=folder)


def by_state_dict(module: Any, shards: list[Any], folder: Path) -> None:
    for value in module.state_dict().values():
        value.mul_(2)


def by_state_dict_locally(module: Any, shards: list[Any], folder: Path) -> None:
    for value in module.state_dict().values():
        value.to_local().mul_(2)


def by_torch_state_dict(module: Any, shards: list[Any], folder: Path) -> None:
    for value in get_model_state_dict(module).values():
        value.to_local().mul_(2)


def by_detached_local(module: Any, shards: list[Any], folder: Path) -> None:
    for shard in shards:
        shard.detach().to_local().mul_(2)


def by_local(module: Any, shards: list[Any], folder: Path) -> None:
    with torch.no_grad():
        for shard in shards:
            shard.to_local().mul_(2)


def by_foreach(module: Any, shards: list[Any], folder: Path) -> None:
    with torch.no_grad():
        torch._foreach_mul_(shards, 2.0)


def by_foreach_state_dict(module: Any, shards: list[Any], folder: Path) -> None:
    torch._foreach_mul_([*module.state_dict().values()], 2.0)


def by_data(module: Any, shards: list[Any], folder: Path) -> None:
    for shard in shards:
        shard.data.mul_(2)


def in_place(module: Any, shards: list[Any], folder: Path) -> None:
    with torch.no_grad():
        for shard in shards:
            shard.mul_(2)


def by_load_state_dict(module: Any, shards: list[Any], folder: Path) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def by_set_model_state_dict(module: Any, shards: list[Any], folder: Path) -> None:
    set_model_state_dict(module, {name: value * 2 for name, value in get_model_state_dict(module).items()})


def twice(load: Callable[[Any, dict[str, torch.Tensor], Path], None]) -> Callable[[Any, list[Any], Path], None]:
    """Return what loads whole values, twice those that a new model has."""

    def write(module: Any, shards: list[Any], folder: Path) -> None:
        torch.manual_seed(SEED)
        load(module, {name: value * 2 for name, value in stack().state_dict().items()}, folder)

    return write


WRITES: dict[str, Callable[[Any, list[Any], Path], None]] = {
    write.__name__: write
    for write in (
        by_checkpoint,
        by_state_dict,
        by_state_dict_locally,
        by_torch_state_dict,
        by_detached_local,
        by_local,
        by_foreach,
        by_foreach_state_dict,
        by_data,
        in_place,
        by_load_state_dict,
        by_set_model_state_dict,
    )
} | {name: twice(load) for name, load in LOADS.items()}


UNSEEN_WRITES = ("by_detached_local", "by_foreach", "by_foreach_state_dict", "by_data")
"""Those that no version counter shows; a warning tells of them."""


def cases() -> list[Any]:
    """Return each way to hold with each way to write."""
    found = []
    for hold, write in itertools.product(HOLDS, WRITES):
        found.append(pytest.param(4 if hold == "hold_pieces" else 2, hold, write, id=f"{hold}, {write}"))
    return found


@pytest.mark.parametrize(("world", "hold", "write"), cases())
def test_written_between_passes(world, hold, write, tmp_path):
    """An evaluation, a loss and gradients were those of the old weights, without a word."""
    POOL.run(world, write_and_compare, {"folder": tmp_path, "hold": hold, "write": write}, LIMIT_SECONDS)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("write", UNSEEN_WRITES)
def test_resharded_behind_a_write_that_nothing_shows(hold, write, tmp_path):
    """What docs/differences.md says: ``reshard()`` after it makes it right."""
    kwargs = {"folder": tmp_path, "hold": hold, "write": write, "reshards": True}
    POOL.run(4 if hold == "hold_pieces" else 2, write_and_compare, kwargs, LIMIT_SECONDS)


def write_and_compare(rank: int, world: int, folder: Path, hold: str, write: str, reshards: bool = False) -> None:
    """One rank of a case."""
    options = {"reshard_after_forward": 2} if hold == "hold_pieces" else {}
    module, alone = beside_one_process(stack, lambda module: [*module], **options)
    shards = [*module.parameters()]
    if write == "by_checkpoint":
        saved = {name: value * 2 for name, value in module.state_dict().items()}
        dcp.save({"model": saved}, checkpoint_id=folder)
    HOLDS[hold](module)
    WRITES[write](module, shards, folder)
    if reshards:
        module.reshard(recurse=True)
    for parameter in alone.parameters():
        parameter.data.mul_(2)
    seen = reshards or write not in UNSEEN_WRITES
    with nullcontext() if seen else pytest.warns(UserWarning, match="0.weight, 0.bias: .* no version counter shows"):
        assert_computes_alike(module, alone)


@on_ranks(2)
def test_what_the_caller_writes_to_full_parameters_is_computed_with(rank, world):
    """Until ``reshard()``, also if no version counter shows it (``weight.data += delta``): the shards were not written.
    As full parameters were compared with these, it could not be told which of the two was newer."""
    module, alone = beside_one_process(stack, lambda module: [*module])
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    hold_by_hand(module)
    for parameter in (*module.parameters(), *alone.parameters()):
        parameter.data.mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(module(INPUTS), alone(INPUTS))
    module.reshard(recurse=True)
    for parameter, value in zip(alone.parameters(), before):
        parameter.data.copy_(value)
    assert_computes_alike(module, alone)


class Normalized(nn.Linear):
    """Normalizes some rows of its weight in forward, others on each rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = slice(0, 2) if dist.get_rank() == 0 else slice(2, 4)
        self.weight.data[rows] = nn.functional.normalize(self.weight.data[rows], dim=1)
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
def test_a_forward_that_writes_to_its_full_parameters_runs_again(rank, world, after):
    """Its values are lost when it is freed, as with torch. Compared with the shards before the second of two forwards,
    they ended the program, and on one rank alone."""
    module = fsdp2.fully_shard(nn.Sequential(nn.Linear(8, 8), Normalized(8, 8)), reshard_after_forward=after)
    for _ in range(2):
        (module(INPUTS).square().mean() + module(INPUTS + 1).square().mean()).backward()
        with torch.no_grad():
            module(INPUTS)


def assert_computes_alike(module: Any, alone: Any) -> None:
    """Assert that an evaluation, a loss and gradients of both are the same."""
    with torch.no_grad():
        torch.testing.assert_close(module(INPUTS), alone(INPUTS))
    losses = [model(INPUTS).square().mean() for model in (module, alone)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for unit in module.modules():
        if isinstance(unit, fsdp2.FSDPModule):
            unit.reshard()
    assert_gradients(module, alone)


class Scaled(nn.Sequential):
    """Layers, and a lone scalar as the root's own parameter: all ranks but one have nothing of it."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(8, 8) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("hold", ["hold_by_hand", "hold_after_backward"])
@pytest.mark.parametrize("write", ["by_state_dict", "by_local", "in_place", "by_load_state_dict", "by_checkpoint"])
def test_a_rank_without_elements(rank, world, tmp_path, hold, write):
    """One rank has nothing to write to, and gathers when the others do. Reading a checkpoint writes to local tensors,
    and nothing shows that there: what is held is freed before, or every rank would raise."""
    module, alone = beside_one_process(Scaled, lambda module: [*module])
    shards = [*module.parameters()]
    if write == "by_checkpoint":
        saved = {name: value * 2 for name, value in module.state_dict().items()}
        dcp.save({"model": saved}, checkpoint_id=tmp_path)
    HOLDS[hold](module)
    if write == "by_checkpoint":
        module.reshard(recurse=True)
    WRITES[write](module, shards, tmp_path)
    for parameter in alone.parameters():
        parameter.data.mul_(2)
    assert_computes_alike(module, alone)


def load_and_compare(module: Any, alone: Any, load: str, folder: Path) -> None:
    """Train both once, run a forward whose memory stays, load twice the weights, and compare."""
    for model in (module, alone):
        model(INPUTS).sum().backward()
        model.zero_grad()
    module(INPUTS)
    values = {name: parameter.detach() * 2 for name, parameter in alone.named_parameters()}
    LOADS[load](module, dict(values), folder)  # which torch writes to
    alone.load_state_dict(values)
    assert_computes_alike(module, alone)


@on_ranks(4)
@pytest.mark.parametrize("load", LOADS)
def test_loaded_after_portions_were_gathered(rank, world, tmp_path, load):
    """With ``shard_over_replicas`` the portions of a forward stay. A rank whose part of them was empty did not see that
    values were loaded, and went on with the portions from before: "ranks do not do the same"."""
    module, alone = beside_one_process(Scaled, lambda module: [*module], mesh=mesh_2d(), shard_over_replicas=True)
    load_and_compare(module, alone, load, tmp_path)


@on_ranks(4)
@pytest.mark.parametrize("load", ["from_rank0_by_torch", "from_rank0", "whole_by_load_state_dict"])
@pytest.mark.parametrize("reshard", [2, False])
def test_loaded_after_a_forward_without_a_backward(rank, world, tmp_path, load, reshard):
    """The memory that such a forward leaves is freed before values are loaded. torch's function had taken the tensors
    that modules showed as those to load into, and the process died with SIGSEGV."""
    module, alone = beside_one_process(Scaled, lambda module: [*module], reshard_after_forward=reshard)
    load_and_compare(module, alone, load, tmp_path)
