"""Train a small llama on two mesh dimensions, with tensor parallelism and fully_shard.

    torchrun --nproc-per-node 4 examples/train_llama_2d.py --tp 2 --out runs/llama --steps 20
    torchrun --nproc-per-node 2 examples/train_llama_2d.py --tp 1 --resume runs/llama --out runs/llama --steps 40
    python examples/train_llama_2d.py --ranks 4 --checkpointing --compile          # starts its processes itself

It runs on CPUs with gloo and on GPUs with NCCL. `build` shards the model; the model and its tensor-parallel plan are in
llama.py. A checkpoint can be resumed on any mesh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported: the profiler would announce itself

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gpt.data import load_text, training_batch
from gpt.processes import (
    Place,
    UserError,
    complain,
    first_decides,
    launch,
    run_rank,
    started_by_torchrun,
)
from llama import Llama, LlamaConfig, loss_context, next_token_loss, tensor_parallel

BATCH, SEED = 8, 0


def build(config: LlamaConfig, mesh: DeviceMesh, options: argparse.Namespace) -> Llama:
    """Return the model on the mesh ("dp", "tp").

    Apply tensor parallelism, compilation, activation checkpointing and fully_shard in this order.
    """
    from fsdp2 import fully_shard

    torch.manual_seed(SEED)
    model = Llama(config)
    if options.tp > 1:
        tensor_parallel(model, mesh["tp"])
    for index, block in enumerate(model.blocks):
        if options.compile:
            block.compile()
        if options.checkpointing:
            model.blocks[index] = block = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard([model.norm, model.head], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(options: argparse.Namespace, place: Place) -> None:
    """Train from the first step or from a checkpoint, and save a checkpoint at the end."""
    folder = first_decides(lambda: None if options.resume is None else newest(options.resume))
    config, first = (LlamaConfig(), 0) if folder is None else first_decides(lambda: read(folder))
    options.tp = options.tp or (2 if place.ranks % 2 == 0 else 1)
    check(options, config, first, place)
    mesh = init_device_mesh(place.device.type, (place.ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    model = build(config, mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if folder is not None:
        load(folder, model, optimizer)
    describe(model, mesh, place)
    text = load_text(None, config.context)
    part = Place(mesh.get_local_rank("dp"), mesh["dp"].size(), place.device)
    for step in range(first, options.steps):
        inputs, targets = training_batch(text, step, BATCH, config.context, SEED, part)
        with loss_context(options.tp > 1):
            loss = next_token_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        dist.all_reduce(value, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        place.say(f"{step + 1:5d} {value.item():9.4f}")
    if options.out is not None:
        final = options.out / f"step-{options.steps:06d}"
        save(final, model, optimizer, {"config": asdict(config), "step": options.steps})
        place.say(f"saved {final}")


def check(options: argparse.Namespace, config: LlamaConfig, first: int, place: Place) -> None:
    """Raise a UserError if options do not fit the model, the batch or the checkpoint."""
    if place.ranks % options.tp:
        raise UserError(f"--tp {options.tp} does not divide the {place.ranks} processes; choose a factor of them")
    for what, size in (("heads", config.heads), ("positions", config.context)):
        if size % options.tp:
            raise UserError(f"--tp {options.tp} does not divide the model's {size} {what}; choose a smaller one")
    if BATCH % (rows := place.ranks // options.tp):
        raise UserError(f"a batch of {BATCH} rows cannot be split over {rows} data-parallel ranks; choose another --tp")
    if options.steps <= first:
        raise UserError(f"the checkpoint is of step {first}; --steps {options.steps} leaves nothing to train")


def describe(model: nn.Module, mesh: DeviceMesh, place: Place) -> None:
    """Print the mesh, the number of parameters, and the number on this rank."""
    parameters = list(model.parameters())
    own = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    place.say(f"mesh        {mesh['dp'].size()} data-parallel x {mesh['tp'].size()} tensor-parallel ranks")
    place.say(f"parameters  {sum(p.numel() for p in parameters):,}, of which {own:,} on this rank")
    place.say(f"{'step':>5} {'loss':>9}")


# --- checkpoints ----------------------------------------------------------------------------------------------------


def newest(path: Path) -> Path:
    """Return the newest checkpoint in the folder `path`."""
    found = sorted(folder for folder in path.glob("step-*") if (folder / "run.json").is_file())
    if not found:
        raise UserError(f"no checkpoint in {path}: expected step-*/run.json; name the --out of an earlier run")
    return found[-1]


def read(folder: Path) -> tuple[LlamaConfig, int]:
    """Return the sizes of the model in a checkpoint, and the checkpoint's step."""
    try:
        run = json.loads((folder / "run.json").read_text())
        return LlamaConfig(**run["config"]), int(run["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"damaged checkpoint {folder}: run.json cannot be read ({type(error).__name__})") from error


def save(final: Path, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, object]) -> None:
    """Write under another name and rename, so that an interrupted save does not damage earlier checkpoints."""
    partial = final.with_name(f".partial-{final.name}")
    first_decides(lambda: make_room(partial, final))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    except dcp.api.CheckpointException as error:
        raise UserError(f"could not save {final}: {next(iter(error.failures.values()))[0]}") from error
    first_decides(lambda: (partial / "run.json").write_text(json.dumps(run)) and partial.rename(final))


def make_room(partial: Path, final: Path) -> None:
    """Make an empty folder `partial`; raise a UserError if `final` exists."""
    if final.exists():
        raise UserError(f"{final} exists already and is not overwritten; choose another --out")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {final.parent}: {error.strerror or error}") from error


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's shards from a checkpoint, which may have been saved on another mesh."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        raise UserError(f"damaged checkpoint {folder}: {next(iter(error.failures.values()))[0]}") from error
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


# --- the command line -----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the error as a UserError."""
        raise UserError(f"{message}; --help lists what can be given")


def positive(text: str) -> int:
    """Return ``text`` as a whole number; it must be at least one."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser(prog="train_llama_2d.py", allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--tp", type=positive, metavar="N", help="tensor-parallel ranks; the rest of the mesh is data-parallel")
    add("--ranks", type=positive, default=4, metavar="N", help="processes to start; ignored under torchrun")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    add("--steps", type=positive, default=20, metavar="N", help="train up to this step")
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    add("--compile", action="store_true", help="torch.compile each block")
    add("--out", type=Path, metavar="FOLDER", help="save a checkpoint in this folder")
    add("--resume", type=Path, metavar="FOLDER", help="resume from the newest checkpoint in it, on any mesh")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Return the exit status: 0, or 2 after printing one line on stderr that says what was wrong with the input."""
    try:
        if not started_by_torchrun():
            return launch(Path(__file__).resolve(), arguments, parse(arguments).ranks)
    except UserError as error:
        return complain(error, "train_llama_2d.py")
    run_rank("train_llama_2d.py", lambda: parse(arguments), train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
