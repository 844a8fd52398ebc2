"""Every way to save x every way to load x every kind of model: each value arrives bit for bit.

No pair is forgotten: a new way is a function in ``SAVES`` or ``LOADS``, a new kind of model is one in ``models.py``.
Where the one leaves another form than the other takes, ``whole_of``, ``state_of``, ``checkpoint_of`` and ``files_of``
do what a user does in between.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2
from float8_linear import Float8Weight
from tests.fsdp1.state_dict.kinds import KINDS as TYPES
from tests.fsdp1.state_dict.kinds import save as save_typed
from tests.fsdp1.state_dict.kinds import using
from tests.support import api
from tests.support.cases import CASES
from tests.support.counting import Collectives
from tests.support.parity import full, mesh_1d, mesh_of
from tests.support.pool import on_ranks
from tests.support.sampling import ALL_VARIABLE
from tests.weights.models import KINDS, NEED_FOUR, assert_holds, once, plain, sharded, values_of, write

pytestmark = api.fsdp2_only
torch.serialization.add_safe_globals([Float8Weight])  # as torch asks for: files of shards name their class
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TINY = 100 / 2**20
"""A bucket of 96 bytes: most tensors travel in several."""
Values = dict[str, Tensor]
Saved = Any
"""A state dict of any form, which is empty where the first rank has it; or the folder of a checkpoint or of files."""


def simply(kind: str, fsdp: Any, ranks: int, values: Values | None = None) -> Any:
    """Return the model of a kind, sharded without options over so many ranks, by either implementation."""
    module = plain(kind)
    module.load_state_dict(values or module.state_dict())
    mesh = mesh_1d() if ranks == dist.get_world_size() else mesh_of(2, ranks, names=("pair", "within"))["within"]
    for unit in [*(CASES[kind].units(module) if kind in CASES else ()), module]:
        fsdp.fully_shard(unit, mesh=mesh)
    return module


# ---- ways to save: each takes the kind, the values and a path that does not exist ----


def through_file(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what a file of this rank gives back."""
    path = path.with_suffix(f".{dist.get_rank()}")
    torch.save(state, path)
    with torch.serialization.safe_globals([_StridedShard]):  # torch 2.11 does not allow it by itself
        return torch.load(path, weights_only=True)


def typed(name: str) -> Callable[..., Saved]:
    """Return how a state dict of a type is saved. Whole ones have the names, order and types of the plain model's."""

    def save(kind: str, values: Values, path: Path) -> Saved:
        state = save_typed(sharded(kind, meta=False, values=values), name)
        assert list(state) == (list(values) if name != "full_on_rank0" or dist.get_rank() == 0 else [])
        assert "full" not in name or all(type(value) is Tensor for value in state.values())
        return through_file(state, path)

    return save


def got(**options: bool) -> Callable[..., Saved]:
    """Return how torch's get_model_state_dict saves."""
    how = StateDictOptions(**options)
    return lambda kind, values, path: through_file(
        get_model_state_dict(sharded(kind, meta=False, values=values), options=how), path
    )


def checkpoint(kind: str, values: Values, path: Path) -> Saved:
    dcp.save(get_model_state_dict(sharded(kind, meta=False, values=values)), checkpoint_id=path)
    return path


def torchs_checkpoint(kind: str, values: Values, path: Path) -> Saved:
    dcp.save(simply(kind, api.theirs, dist.get_world_size(), values).state_dict(), checkpoint_id=path)
    return path


def files(kind: str, values: Values, path: Path) -> Saved:
    fsdp2.save_safetensors(sharded(kind, meta=False, values=values), path, 100, bucket_mb=TINY)
    return path


SAVES: dict[str, Callable[[str, Values, Path], Saved]] = {
    **{f"state dict, {name}": typed(name) for name in TYPES},
    "get_model_state_dict": got(),
    "get_model_state_dict, full": got(full_state_dict=True),
    "get_model_state_dict, full on rank 0": got(full_state_dict=True, cpu_offload=True),
    "dcp.save": checkpoint,
    "dcp.save of torch's own": torchs_checkpoint,
    "save_safetensors": files,
    "one process": lambda kind, values, path: through_file(values, path),
}


# ---- what a user does to get from one form to another ----


def from_all(value: Any) -> list[Any]:
    """Return what every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def has_pieces(state: dict[str, Any]) -> bool:
    """Whether it is a local state dict."""
    return any(isinstance(value, dict) for value in state.values())


def whole_of(saved: Saved) -> Values:
    """Return whole tensors on every rank; those of files are without second names of tied parameters."""
    if isinstance(saved, Path) and (saved / ".metadata").exists():
        if dist.get_rank() == 0:
            dcp_to_torch_save(saved, saved / "whole")
        dist.barrier()
        return torch.load(saved / "whole", weights_only=True)
    if isinstance(saved, Path):
        return {key: value for path in saved.glob("*.safetensors") for key, value in load_file(path).items()}
    if has_pieces(saved):
        return fsdp2.merge_local_state_dicts(from_all(saved))
    return from_all({name: full(value) for name, value in saved.items()})[0]


def state_of(saved: Saved, values: Values) -> dict[str, Any]:
    """Return a state dict with all names on every rank: of shards, of pieces, or whole."""
    if not isinstance(saved, Path) and all(from_all(bool(saved))):
        return saved
    found, names = whole_of(saved), {id(value): name for name, value in once_named(values).items()}
    return {name: found[name] if name in found else found[names[id(value)]] for name, value in values.items()}


def once_named(values: Values) -> Values:
    """Return the values without second names of tied parameters, of which files have the first."""
    return {name: values[name] for name in once(values)}


def checkpoint_of(saved: Saved, values: Values, folder: Path) -> Path:
    """Return a checkpoint of torch.distributed.checkpoint."""
    if isinstance(saved, Path) and (saved / ".metadata").exists():
        return saved
    state = state_of(saved, values)
    dcp.save(whole_of(state) if has_pieces(state) else state, checkpoint_id=folder / "checkpoint")
    return folder / "checkpoint"


def files_of(saved: Saved, values: Values, folder: Path) -> Path:
    """Return files of the safetensors library."""
    if isinstance(saved, Path) and not (saved / ".metadata").exists():
        return saved
    whole = whole_of(saved)
    write(folder / "model.safetensors", {name: whole[name] for name in once_named(values)}, dist.get_rank())
    return folder / "model.safetensors"


# ---- ways to load: each takes the kind, what was saved, the values for their names, and a folder ----


def loaded(module: Any, state: dict[str, Any], **how: bool) -> Any:
    """Load a state dict. Nothing is sent of what is whole."""
    with Collectives() as seen:
        result = module.load_state_dict(state, **how)
    assert not result.missing_keys and not result.unexpected_keys
    assert not seen.gathers or any(isinstance(value, DTensor) for value in state.values())
    return module


def state_dict(meta: bool, **how: bool) -> Callable[..., Any]:
    """Return how a state dict is loaded."""
    return lambda kind, saved, values, folder: loaded(sharded(kind, meta=meta), state_of(saved, values), **how)


def inside(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    module = sharded(kind, meta=False)
    with using(module, "full"):
        return loaded(module, state_of(saved, values))


def shards_set(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    module = sharded(kind, meta=False)
    set_model_state_dict(module, state_of(saved, values))
    return module


def broadcast_by_torch(meta: bool) -> Callable[..., Any]:
    """Return how torch's set_model_state_dict sends what the first rank has.

    It sends the memory of a tensor as it lies: others get the elements of a turned one in another order.
    """

    def load(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
        module, state = sharded(kind, meta=meta), {k: v.contiguous() for k, v in state_of_whole(saved, values).items()}
        set_model_state_dict(module, {} if dist.get_rank() else state, options=BROADCAST)
        return module

    return load


def state_of_whole(saved: Saved, values: Values) -> Values:
    """Return whole tensors under all names on every rank."""
    return whole_of(state_of(saved, values))


def broadcast(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    # DTensors are made of what the first rank sends, so that no other may be on the meta device alone.
    meta = dist.get_rank() > 0 and kind not in (*NEED_FOUR, "beside_another")
    module, whole = sharded(kind, meta=meta), whole_of(saved)
    fsdp2.broadcast_from_rank0(module, {} if dist.get_rank() else whole, bucket_mb=TINY)
    return module


def from_checkpoint(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    return read(sharded(kind, meta=False), checkpoint_of(saved, values, folder))


def into_torchs(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    return read(simply(kind, api.theirs, dist.get_world_size()), checkpoint_of(saved, values, folder))


def read(module: nn.Module, path: Path) -> nn.Module:
    """Load a checkpoint."""
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state)
    return module


def from_files(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    module = sharded(kind, meta=True)
    fsdp2.load_safetensors(module, files_of(saved, values, folder))
    return module


def on_fewer_ranks(kind: str, saved: Saved, values: Values, folder: Path) -> Any:
    state = state_of(saved, values)
    module = simply(kind, fsdp2, dist.get_world_size() // 2)
    return loaded(module, whole_of(state) if has_pieces(state) else state)


LOADS: dict[str, Callable[[str, Saved, Values, Path], Any]] = {
    "load_state_dict": state_dict(False),
    "load_state_dict, assign": state_dict(False, assign=True),
    "load_state_dict, assign, meta": state_dict(True, assign=True),
    "load_state_dict inside state_dict_type": inside,
    "set_model_state_dict": shards_set,
    "set_model_state_dict, broadcast": broadcast_by_torch(False),
    "set_model_state_dict, broadcast, meta": broadcast_by_torch(True),
    "dcp.load": from_checkpoint,
    "dcp.load into torch's own": into_torchs,
    "load_safetensors, meta": from_files,
    "broadcast_from_rank0, meta": broadcast,
    "one process": lambda kind, saved, values, folder: loaded(plain(kind), state_of_whole(saved, values)),
    "fewer ranks": on_fewer_ranks,
}


def walk(kind: str, save: str, load: str, folder: Path) -> None:
    """Save one model, load another, and compare."""
    values = values_of(plain(kind))
    folder.mkdir(exist_ok=True)
    saved = SAVES[save](kind, values, folder / "saved")
    dist.barrier()
    module = LOADS[load](kind, saved, values, folder)
    assert_holds(module, values)
    trained = [parameter.requires_grad for parameter in plain(kind).parameters()]
    assert [parameter.requires_grad for parameter in module.parameters()] == trained  # as many: ties are ties
    for name, parameter in module.named_parameters() if "torch" not in load else ():
        if isinstance(parameter, DTensor) and (kind, name) != ("beside_another", "2.bias"):
            local = parameter.to_local()  # no rank keeps whole tensors alive
            assert type(local) is not Tensor or local.untyped_storage().nbytes() == local.nbytes


def is_possible(kind: str, ways: str) -> bool:
    """Whether torch's part of it can be done."""
    if kind == "used_several_times" and "broadcast" in ways:
        return "broadcast_from_rank0" in ways  # torch's leaves out second names of a module on all ranks but the first
    takes_it = CASES[kind].torch_takes_it if kind in CASES else kind != "last_dim"
    return takes_it or "torch's own" not in ways


def assert_table(kind: str, folder: Path) -> None:
    """Walk the cells of a kind, and name all that fail.

    In a usual run each pair of a way to save and one to load meets in some kind, and each kind meets half of the ways.
    """
    failed = []
    block, place = divmod((*KINDS, *NEED_FOUR).index(kind), len(SAVES))
    for column, load in enumerate(LOADS):
        for row, save in enumerate(SAVES):
            usual = (row - column - place) % len(SAVES) == 0 and (column - block) % 2 == 0
            if not is_possible(kind, f"{save}, {load}") or not (usual or os.environ.get(ALL_VARIABLE)):
                continue
            try:
                walk(kind, save, load, folder / f"{row}-{column}")
            except Exception:
                failed.append(f"{save} x {load} x {kind}:\n{traceback.format_exc()}")
    assert not failed, f"{len(failed)} cells:\n" + "\n".join(failed)


@on_ranks(2, limit=600)
@pytest.mark.parametrize("kind", KINDS)
def test_table(rank, world, tmp_path, kind):
    """Every cell of one kind of model."""
    assert_table(kind, tmp_path)


@on_ranks(4, limit=600)
@pytest.mark.parametrize("kind", NEED_FOUR)
def test_table_of_two_dimensions(rank, world, tmp_path, kind):
    """The same where parameters lie on meshes of two dimensions."""
    assert_table(kind, tmp_path)
