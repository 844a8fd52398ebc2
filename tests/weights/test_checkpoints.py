"""torch.distributed.checkpoint: what was saved on one mesh is loaded on another, model and optimizer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import WIDTH, fulls, mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks

SAVED_AT, STEPS = 1, 3


def build(seed: int) -> nn.Sequential:
    """Return layers of sizes that no number of ranks here divides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


_made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def made(name: str) -> Any:
    """Return the mesh of the first three ranks, or a process group for saving beside training; one per world."""
    known = _made.setdefault(dist.group.WORLD, {})
    if name not in known:
        known[name] = (
            dist.new_group() if name == "beside" else DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("three",))
        )
    return known[name]


@dataclass
class Layout:
    """Where a model lives: a data-parallel mesh, a tensor-parallel one perhaps, and the dimension that is cut."""

    dp: DeviceMesh
    tp: DeviceMesh | None = None
    dim: int = 0
    over_replicas: bool = False

    @classmethod
    def of(cls, name: str) -> Layout:
        """Return a layout by name; every rank must ask."""
        halves, both = mesh_of(2, 2, names=("half", "pair")), mesh_2d("dp", "tp")
        alone = mesh_of(4, 1, names=("of", "one"))
        return {
            "four": lambda: cls(mesh_1d()),
            "three": lambda: cls(made("three")),
            "two": lambda: cls(halves["pair"]),
            "one": lambda: cls(alone["one"]),
            "other dimension": lambda: cls(mesh_1d(), dim=1),
            "hybrid": lambda: cls(mesh_2d()),
            "over replicas": lambda: cls(mesh_2d(), over_replicas=True),
            "tensor parallel": lambda: cls(both["dp"], both["tp"]),
        }[name]()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that save or load one copy together; None for all."""
        whole = self.tp is not None or self.dp.ndim == 2 or self.dp.size() == dist.get_world_size()
        return None if whole else self.dp.get_group()

    @property
    def has_me(self) -> bool:
        """Whether this rank takes part."""
        return self.dp.get_coordinate() is not None

    def trainer(self, seed: int, fsdp: Any = api.ours) -> Trainer:
        """Return a sharded model and its optimizer."""
        module = build(seed)
        if self.tp is not None:
            plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
            parallelize_module(module, self.tp, plan)
        place = lambda p: Shard(self.dim) if p.ndim > self.dim else None
        options = {"shard_over_replicas": True} if self.over_replicas else {}
        for unit in (*module, module):
            fsdp.fully_shard(unit, mesh=self.dp, shard_placement_fn=place, **options)
        return Trainer(module)


class Trainer:
    """A model and its optimizer, trained on rows that are the same on every rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # DTensor's operators on meshes of two dimensions would take most of the time.
        self.optimizer = fsdp2.use_local_shards(torch.optim.AdamW(module.parameters(), lr=0.05))

    def train(self, first: int, last: int) -> None:
        """Run steps ``first`` to ``last`` - 1."""
        for step in range(first, last):
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            self.module(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Load what was saved."""
        state = self.state()
        dcp.load(state, checkpoint_id=path, process_group=group)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def values(self) -> dict[str, Tensor | None]:
        """Return whole weights and moments."""
        found = {}
        for name, parameter in self.module.named_parameters():
            found[name] = parameter
            found |= {f"{name} {key}": value for key, value in self.optimizer.state[parameter].items()}
        return fulls(found)


def assert_values(trainer: Trainer, steps: int) -> None:
    """Assert that a model is what a single process has after so many steps."""
    alone = Trainer(build(1))
    alone.train(0, steps)
    expected, got = alone.values(), trainer.values()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")


PAIRS = [
    ("other dimension", "tensor parallel"),
    ("hybrid", "over replicas"),
    ("three", "one"),
]
OTHERS = [
    ("tensor parallel", "hybrid"),
    ("over replicas", "three"),
    ("one", "four"),
    ("four", "two"),
    ("two", "other dimension"),
]
"""Each layout is once where a checkpoint was saved, and once where it is loaded."""
slow = lambda pairs: [pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@composes("saved elsewhere", "uneven", "Adam")
@composes("saved elsewhere", "shard dim", "Adam")
@composes("saved elsewhere", "hybrid sharding", "Adam")
@composes("saved elsewhere", "over replicas", "Adam", "uneven")
@composes("saved elsewhere", "tensor parallel", "Adam")
@composes("saved elsewhere", "tensor parallel", "hybrid sharding")
@composes("saved elsewhere", "tensor parallel", "shard dim")
@on_ranks(4)
@pytest.mark.parametrize(("there", "here"), [*PAIRS, *slow(OTHERS)])
def test_another_layout(rank, world, tmp_path, there, here):
    """Training goes on from a checkpoint of another layout as if it had not stopped."""
    source, target = Layout.of(there), Layout.of(here)
    saving = source.has_me and (source.group is None or rank < source.dp.size())
    if source.has_me:
        trainer = source.trainer(1)
        trainer.train(0, SAVED_AT)
        if saving:  # of several copies the first
            dcp.save(trainer.state(), checkpoint_id=tmp_path, process_group=source.group)
    dist.barrier()
    if target.has_me:
        other = target.trainer(2)
        other.load(tmp_path, target.group)
        assert_values(other, SAVED_AT)
        other.train(SAVED_AT, STEPS)
        assert_values(other, STEPS)


@composes("saved elsewhere", "uneven", "Adam")
@composes("saved elsewhere", "hybrid sharding", "Adam")
@composes("saved elsewhere", "tensor parallel", "Adam")
@on_ranks(4)
@pytest.mark.parametrize("name", ["four", "hybrid", "tensor parallel"])
@pytest.mark.parametrize("ours_saves", [True, False])
def test_between_torchs_and_ours(rank, world, tmp_path, name, ours_saves):
    """A checkpoint does not tell who made the shards."""
    first, second = (api.ours, api.theirs) if ours_saves else (api.theirs, api.ours)
    trainer = Layout.of(name).trainer(1, first)
    trainer.train(0, SAVED_AT)
    dcp.save(trainer.state(), checkpoint_id=tmp_path)
    other = Layout.of(name).trainer(2, second)
    other.load(tmp_path, None)
    other.train(SAVED_AT, STEPS)
    assert_values(other, STEPS)


@composes("saved elsewhere", "async save", "hybrid sharding", "Adam")
@composes("saved elsewhere", "async save", "over replicas", "Adam")
@composes("saved elsewhere", "async save", "tensor parallel", "Adam")
@composes("saved elsewhere", "async save", "shard dim", "Adam")
@on_ranks(4)
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("tensor parallel", "hybrid"),
        ("over replicas", "other dimension"),
        *slow([("four", "hybrid"), ("hybrid", "two")]),
    ],
)
def test_training_goes_on_while_it_is_saved(rank, world, tmp_path, there, here):
    """An asynchronous save holds the values of when it began, though training changes them at once."""
    trainer, target = Layout.of(there).trainer(1), Layout.of(here)
    trainer.train(0, SAVED_AT)
    saving = dcp.async_save(trainer.state(), checkpoint_id=tmp_path, process_group=made("beside"))
    trainer.train(SAVED_AT, STEPS)
    saving.result()
    assert_values(trainer, STEPS)
    dist.barrier()
    other = target.trainer(2)
    other.load(tmp_path, target.group)
    assert_values(other, SAVED_AT)


class Dying(dcp.FileSystemWriter):
    """A disk that is full when the last file, which makes the others a checkpoint, is written."""

    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError("no space left on device")


@composes("saved elsewhere", "async save", "Adam")
@on_ranks(4)
@pytest.mark.parametrize("wait", [True, False])
def test_interrupted_save(rank, world, tmp_path, wait):
    """A save that fails on one rank fails on all, hurts neither training nor the checkpoint before it, and is none."""
    trainer = Layout.of("four").trainer(1)
    trainer.train(0, SAVED_AT)
    dcp.save(trainer.state(), checkpoint_id=tmp_path / "whole")
    trainer.train(SAVED_AT, SAVED_AT + 1)
    with pytest.raises(dcp.api.CheckpointException, match="no space left"):
        writer = Dying(tmp_path / "partial")
        if wait:
            dcp.save(trainer.state(), storage_writer=writer)
        else:
            dcp.async_save(trainer.state(), storage_writer=writer, process_group=made("beside")).result()
    trainer.train(SAVED_AT + 1, STEPS)
    assert_values(trainer, STEPS)
    other = Layout.of("hybrid").trainer(2)
    with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata|metadata is None"):
        other.load(tmp_path / "partial", None)
    other.load(tmp_path / "whole", None)
    assert_values(other, SAVED_AT)
    assert all(isinstance(parameter, DTensor) for parameter in other.module.parameters())
