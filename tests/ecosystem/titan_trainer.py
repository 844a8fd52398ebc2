"""Train two layers of the Llama that torchtitan debugs with, by its own trainer, on the CPU.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.ecosystem.titan_trainer FOLDER [options]

``--fsdp2``: after ``fsdp2.install()``. ``--loss`` and ``--schedule``: torchtitan's chunked loss, or one that computes
all logits at once; a pipeline of two stages. ``--dtype``: of computation; gradients are reduced in float32.
``--rounded``: gradients of norms are rounded to bfloat16 as soon as autograd has them.

Each rank saves in the folder what it saw: losses, norms, gradients before they are clipped, and weights. Not
torchtitan's: data, which are random words; attention, its plain one in place of the one that it compiles; and what only
an accelerator has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if "--fsdp2" in sys.argv:
    import fsdp2

    fsdp2.install()

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# As it is imported, torchtitan chooses CUDA where torch finds no accelerator.
with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry, model_registry
    from torchtitan.trainer import Trainer

PARSER = argparse.ArgumentParser()
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("--fsdp2", action="store_true")
PARSER.add_argument("--loss", choices=("chunked", "whole"), default="whole")
PARSER.add_argument("--schedule", default="")
PARSER.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
PARSER.add_argument("--rounded", action="store_true")
GIVEN = PARSER.parse_args()

WORDS, ROWS, LENGTH, STEPS = 2048, 4, 32, 3


class NoMonitor:
    """Nothing watches the memory of a CPU."""

    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class RandomWords(BaseDataLoader):
    """Other words on each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **others: Any) -> None:
        self.rank, self.rows = dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        positions = torch.arange(LENGTH).repeat(self.rows, 1)
        while True:
            words = torch.randint(WORDS, (self.rows, LENGTH + 1), generator=generator)
            yield {"input": words[:, :-1], "positions": positions}, words[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Words are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *unused: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *unused: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class PipelineTrainer(Trainer):
    """One whose pipeline gets a batch and cuts it itself: schedules take a list of micro-batches since torch 2.14."""

    def pp_forward_backward_step(
        self,
        *,
        input_dict_mbs: list[dict[str, torch.Tensor]],
        label_mbs: list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        parts = [self.post_dataloading_process(*pair) for pair in zip(input_dict_mbs, label_mbs)]
        words, labels = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        others = {name: torch.cat([part[2][name] for part in parts]) for name in parts[0][2]}
        losses: list[torch.Tensor] = []
        with self.train_context():
            self.pp_schedule.step(
                *([words] if self.pp_has_first_stage else []),
                **others,
                target=labels if self.pp_has_last_stage else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": global_valid_tokens},
                return_outputs=False,
            )
        return torch.stack(losses).sum() if losses else torch.zeros(())


def configure() -> Any:
    """Return torchtitan's configuration of its debugging model, with what the options ask for."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if GIVEN.loss == "whole":
        config.loss = CrossEntropyLoss.Config(global_vocab_size=WORDS)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomWords.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS, LENGTH, STEPS
    config.training.mixed_precision_param = GIVEN.dtype
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    if GIVEN.schedule:
        config.parallelism.pipeline_parallel_schedule = GIVEN.schedule
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.pipeline_parallel_first_stage_less_layers = 0
        config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 0
    config.dump_folder = str(GIVEN.folder)
    return config


def round_gradients(module: Any) -> None:
    """Round the gradient of the weight to bfloat16 before anything is added to it."""

    def before(module: Any, inputs: object) -> None:
        module.weight.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))

    module.register_forward_pre_hook(before)


def main() -> None:
    """Train, and save what this rank saw."""
    metrics.build_device_memory_monitor = NoMonitor
    utils.set_pg_timeouts = lambda **unused: None  # a barrier that names a device
    trainer = (PipelineTrainer if GIVEN.schedule else Trainer)(configure())
    modules = {name: one for part in trainer.model_parts for name, one in part.named_modules()}
    units = [one for one in modules.values() if isinstance(one, FSDPModule)]
    if not GIVEN.fsdp2:
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)  # with a divide factor torch's own cannot use gloo
    if GIVEN.rounded:
        for name, one in modules.items():
            if name.endswith("norm"):
                round_gradients(one)
    homes = sorted({type(unit).__mro__[1].__module__.partition(".")[0] for unit in units})
    seen: dict[str, Any] = {"units": homes, "losses": [], "norms": [], "gradients": []}
    log, clip = trainer.metrics_processor.log, utils.clip_grad_norm_

    def note_loss(step: int, loss: float, *others: Any, **options: Any) -> None:
        seen["losses"].append(loss)
        log(step, loss, *others, **options)

    def note_gradients(*arguments: Any, **options: Any) -> torch.Tensor:
        seen["gradients"].append({name: parameter.grad.full_tensor().clone() for name, parameter in named()})
        seen["norms"].append(clip(*arguments, **options))
        return seen["norms"][-1]

    def named() -> Iterator[tuple[str, Any]]:
        for part in trainer.model_parts:
            yield from part.named_parameters()

    trainer.metrics_processor.log, utils.clip_grad_norm_ = note_loss, note_gradients
    trainer.train()
    seen["weights"] = {name: parameter.detach().full_tensor() for name, parameter in named()}
    torch.save(seen, GIVEN.folder / f"rank{dist.get_rank()}.pt")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
