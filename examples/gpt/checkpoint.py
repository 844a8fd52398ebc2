"""Sharded checkpoints that are written completely or not at all, and that detect damage.

A checkpoint is a folder in which torch.distributed.checkpoint writes each rank's shards, plus one file with the job's
progress and the size and SHA-256 of every other file. It is written under another name and renamed when it is complete,
so a killed save leaves the previous checkpoint intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gpt.processes import Place, UserError, first_decides, together
from gpt.record import Progress

DESCRIPTION = "checkpoint.json"


def save(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, place: Place) -> Path:
    """Write a checkpoint under `out` with all ranks and return its folder; raise a UserError on all if that fails."""
    final = _folder(out, progress.step)
    partial = final.with_name(f".partial-{final.name}")
    first_decides(lambda: _make_room(partial, final))
    together(lambda: _write_shards(partial, model, optimizer))
    first_decides(lambda: _complete(partial, final, progress))
    return final


def find(path: Path) -> Path:
    """Return the checkpoint at `path`: `path` itself, or the newest checkpoint if `path` is the folder of a run."""
    if not path.is_dir():
        raise UserError(f"no checkpoint: {path} is {'not a folder' if path.exists() else 'not there'}")
    found = saved_steps(path)
    if found:
        return _folder(path, max(found))
    if (path / DESCRIPTION).exists() or path.name.startswith("step-"):
        return path
    raise UserError(f"no checkpoint in {path}: expected {DESCRIPTION} or checkpoints/step-* in it")


def saved_steps(out: Path) -> list[int]:
    """Return the steps of the complete checkpoints of the run in the folder `out`, in no particular order."""
    names = [folder.name.removeprefix("step-") for folder in (out / "checkpoints").glob("step-*")]
    return [int(name) for name in names if name.isdecimal()]


def verify(folder: Path) -> Progress:
    """Check that no file of the checkpoint in `folder` has changed, and return the progress stored in it."""
    try:
        description = json.loads((folder / DESCRIPTION).read_bytes())
        files: dict[str, dict[str, Any]] = description["files"]
        progress = Progress.from_json(description["progress"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{DESCRIPTION} cannot be read ({type(error).__name__})") from error
    for name, saved in files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"{name} is missing")
        if path.stat().st_size != saved["bytes"]:
            raise _damaged(folder, f"{name} has {path.stat().st_size:,} bytes, not {saved['bytes']:,}")
        if _digest(path) != saved["sha256"]:
            raise _damaged(folder, f"the contents of {name} have changed")
    return progress


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint's values into every rank's shards of `model` and `optimizer`.

    A different number of ranks may have saved it: for each shard, torch.distributed.checkpoint reads the pieces of the
    saved shards that overlap it.
    """

    def read() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        try:
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            raise _damaged(folder, str(next(iter(error.failures.values()))[0])) from error
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    together(read)


def prepare(out: Path, resumed_at: int | None) -> None:
    """Create the folder `out`, and check that it is writable and has no later checkpoints than `resumed_at`."""
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = out / "checkpoints" / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the output folder {out}: {error.strerror or error}") from error
    later = [step for step in saved_steps(out) if resumed_at is None or step > resumed_at]
    if later:
        what = "a run" if resumed_at is None else f"a checkpoint of step {max(later)}, later than {resumed_at}"
        raise UserError(f"{out} already holds {what}; resume it with --resume {out}, or choose another --out")


def _folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def _make_room(partial: Path, final: Path) -> None:
    """Make an empty folder `partial`, in place of one that a killed save left; `final` must not exist."""
    if final.exists():
        raise UserError(f"{final} exists already and is not overwritten; choose another --out")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise _unsaved(final, error) from error


def _write_shards(partial: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    except dcp.api.CheckpointException as error:
        raise _unsaved(partial, next(iter(error.failures.values()))[0]) from error


def _complete(partial: Path, final: Path, progress: Progress) -> None:
    """Add the description, flush it to the disk, and give the folder its final name."""
    try:
        written = sorted(partial.iterdir())
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in written}
        with open(partial / DESCRIPTION, "x", encoding="utf-8") as stream:
            json.dump({"progress": progress.to_json(), "files": files}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(final)
    except OSError as error:
        raise _unsaved(final, error) from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"damaged checkpoint {folder}: {what}; resume from another one")


def _unsaved(folder: Path, error: BaseException) -> UserError:
    reason = (isinstance(error, OSError) and error.strerror) or error
    return UserError(f"could not save {folder}: {reason}; earlier checkpoints are as they were")
