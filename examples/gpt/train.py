"""The training job: check, shard, measure, train, save. Only `build` uses fully_shard."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard, record_steps
from gpt import checkpoint, report, screen
from gpt.data import Batch, Text, held_out_batches, load_text, training_batch
from gpt.generate import generate
from gpt.memory import peak_of
from gpt.model import GPT, next_byte_loss
from gpt.options import Options, Settings
from gpt.processes import Place, UserError, first_decides, together
from gpt.record import Progress, Run

WARM_UP = 20  # steps until the learning rate is at its highest
SETTLING = 2  # the first steps are not timed; memory is measured in the last of these
SAME_LOSS = 0.01  # nats; a correctly restored model repeats its loss up to rounding


@dataclass
class Job:
    """The data, model and settings that a step needs."""

    place: Place
    options: Options
    out: Path
    text: Text
    held_out: list[Batch]
    progress: Progress
    model: GPT
    optimizer: torch.optim.Optimizer

    @property
    def run(self) -> Run:
        """The record of the run in progress."""
        return self.progress.runs[-1]

    @property
    def goal(self) -> int:
        """The step after which this run ends."""
        return _goal(self.options, self.progress.settings)

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of `step`."""
        settings = self.progress.settings
        return training_batch(self.text, step, settings.batch, settings.context, settings.seed, self.place)


def train(options: Options, place: Place) -> None:
    """Train the model, save it and report. If the input is wrong, every rank raises a UserError."""
    out, start, saved = first_decides(lambda: _where(options))
    progress, text = together(lambda: _plan(options, saved, place))
    first_decides(lambda: checkpoint.prepare(out, None if saved is None else saved.step))

    settings = progress.settings
    run = Run(place.ranks, place.backend, progress.step, first_decides(lambda: _compute(options, place)))
    run.peak_bytes_unsharded = _largest(_peak_unsharded(settings, text, place, run.compute), place)
    model, optimizer = build(settings, place, run.compute)
    run.parameters, run.parameters_per_rank = _sizes(model, place)
    place.say(screen.opening(run, settings, text, start))
    if start is not None:
        checkpoint.load(start, model, optimizer)

    held_out = held_out_batches(text, settings.context, place)
    progress.runs.append(run)
    job = Job(place, options, out, text, held_out, progress, model, optimizer)
    _look_before(job, saved)
    _train_steps(job)
    _look_after(job)


def build(settings: Settings, place: Place, compute: str) -> tuple[GPT, torch.optim.Optimizer]:
    """Return the model, sharded over all ranks block by block, and an optimizer of its shards."""
    model = new_model(settings, place)
    mesh = init_device_mesh(place.device.type, (place.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, compute), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, new_optimizer(model, settings)


def new_model(settings: Settings, place: Place) -> GPT:
    """Return the whole model in float32. It is the same on every rank, because all ranks use the same seed."""
    torch.manual_seed(settings.seed)
    return GPT(settings.model).to(place.device)


def new_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW for the model's current parameters. After fully_shard these are shards, so its state is sharded."""
    rate, betas = settings.learning_rate, (0.9, 0.95)
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.1, fused=True)


def learning_rate(step: int, settings: Settings) -> float:
    """Return the rate: a linear warm-up, then half a cosine down to a tenth. It depends only on `step`."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return settings.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / settings.steps)))


def update(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch, autocast: bool = False) -> Tensor:
    """Train on this rank's rows and return their loss. The code is the same for a sharded and an unsharded model."""
    inputs, targets = batch
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=autocast):
        loss = next_byte_loss(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def held_out_loss(model: GPT, batches: list[Batch], place: Place) -> float:
    """Distribute `batches` over the ranks, and return the mean loss of all. Every rank must call this."""
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    for first in range(0, len(batches), place.ranks):
        mine = first + place.rank
        # A rank without a batch of its own repeats one: every rank must take part in every gather.
        inputs, targets = batches[min(mine, len(batches) - 1)]
        loss = next_byte_loss(model(inputs), targets)
        if mine < len(batches):
            total += loss
    dist.all_reduce(total)
    return total.item() / len(batches)


def _where(options: Options) -> tuple[Path, Path | None, Progress | None]:
    """Return the output folder, and the checkpoint to start from and its progress, if there is one."""
    out = options.out or Path("runs", datetime.now().strftime("%Y-%m-%d-%H%M%S"))
    if options.resume is None:
        return out, None, None
    start = checkpoint.find(options.resume)
    return out, start, checkpoint.verify(start)


def _plan(options: Options, saved: Progress | None, place: Place) -> tuple[Progress, Text]:
    """Return the progress before this run, and the text; raise a UserError if there is nothing to do."""
    settings = options.settings(saved.settings if saved else None)
    settings.check(place.ranks)
    known = Path(saved.text) if saved and saved.text else None
    text = load_text(options.text or known, settings.context)
    progress = Progress(settings, text.path, text.digest, list(saved.runs) if saved else [])
    if progress.step >= (goal := _goal(options, settings)):
        raise UserError(f"nothing to do: step {progress.step} is reached and the run ends at {goal}; raise --steps")
    return progress, text


def _compute(options: Options, place: Place) -> str:
    if options.compute != "auto":
        return options.compute
    return "bfloat16" if place.fast_bfloat16 else "float32"


def _goal(options: Options, settings: Settings) -> int:
    return min(settings.steps, options.stop_at or settings.steps)


def _peak_unsharded(settings: Settings, text: Text, place: Place, compute: str) -> int:
    """Return the peak bytes of a step without fully_shard: the whole float32 model, with autocast for bfloat16."""
    autocast = compute == "bfloat16"
    model = new_model(settings, place)
    optimizer = new_optimizer(model, settings)
    batch = training_batch(text, 0, settings.batch, settings.context, settings.seed, place)
    update(model, optimizer, batch, autocast)  # now AdamW has its state
    return peak_of(lambda: update(model, optimizer, batch, autocast), place.device)


def _largest(value: int, place: Place) -> int:
    box = torch.tensor(value, device=place.device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)


def _sizes(model: GPT, place: Place) -> tuple[int, int]:
    """Return the number of elements of the whole model, and of the shards of the rank that has most."""
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return sum(p.numel() for p in model.parameters()), _largest(sum(s.numel() for s in shards), place)


def _look_before(job: Job, saved: Progress | None) -> None:
    """Record the held-out loss before this run, and compare it with the checkpoint's if there is one."""
    loss = held_out_loss(job.model, job.held_out, job.place)
    job.run.held_out.append((job.progress.step, loss))
    if saved is None:
        job.place.say(f"held-out loss before training {loss:.4f} nats per byte (guessing: {math.log(256):.4f})\n")
        _show_sample(job, "generated before training")
        return
    step, before = saved.runs[-1].held_out[-1]
    job.place.say(
        f"held-out loss at step {step}: {before:.4f} when saved by {saved.runs[-1].ranks} processes, "
        f"{loss:.4f} now on {job.place.ranks}\n"
    )
    same = saved.text_digest == job.text.digest and saved.runs[-1].compute == job.run.compute
    if same and abs(loss - before) > SAME_LOSS:
        raise UserError(f"the checkpoint does not continue: held-out loss was {before:.4f} and is {loss:.4f}")


def _train_steps(job: Job) -> None:
    options, run, seconds = job.options, job.run, 0.0
    with screen.Bar(job.place, job.progress.step, job.goal) as bar:
        for step in range(job.progress.step, job.goal):
            began = time.perf_counter()
            done = step + 1
            if done == job.goal and options.report:
                with record_steps(job.model) as record:
                    run.losses.append(_one_step(job, step))
                first_decides(partial((job.out / "step.json").write_text, record.timeline.to_json()))
            else:
                run.losses.append(_one_step(job, step))
            if len(run.losses) > SETTLING:
                seconds += time.perf_counter() - began
                tokens = job.progress.settings.batch * job.progress.settings.context
                run.tokens_per_second = tokens * (len(run.losses) - SETTLING) / seconds
            bar.step(run)
            saving = done % options.save_every == 0 or done == job.goal
            if saving or done % options.eval_every == 0:
                run.held_out.append((done, held_out_loss(job.model, job.held_out, job.place)))
            if saving:
                path = checkpoint.save(job.out, job.model, job.optimizer, job.progress, job.place)
                bar.write(f"saved {path}")


def _one_step(job: Job, step: int) -> float:
    """Train one step, and return the loss of its global batch."""
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(step, job.progress.settings)
    losses: list[Tensor] = []

    def work() -> None:
        losses.append(update(job.model, job.optimizer, job.batch(step)))

    if len(job.run.losses) == SETTLING - 1:
        job.run.peak_bytes = _largest(peak_of(work, job.place.device), job.place)
    else:
        work()
    dist.all_reduce(losses[0], dist.ReduceOp.AVG)
    return losses[0].item()


def _look_after(job: Job) -> None:
    job.place.say(f"\nheld-out loss at step {job.progress.step}: {job.run.held_out[-1][1]:.4f}\n")
    if job.progress.step == job.progress.settings.steps:
        _show_sample(job, "generated after training")
    if job.options.report:
        job.place.say(report.table(job.progress))
        drawn = first_decides(lambda: report.picture(job.progress, job.out / "loss.png"))
        job.place.say(f"\nloss curve: {drawn}")


def _show_sample(job: Job, title: str) -> None:
    if job.options.sample == 0:
        return
    prompt = job.options.prompt.encode(errors="surrogateescape")
    continued = generate(job.model, prompt, job.options.sample, job.place)
    job.place.say(screen.sample(title, prompt, continued))
