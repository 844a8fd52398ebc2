"""The Trainer of transformers, and the SFTTrainer of TRL, with FSDP2 on a tiny model made here, not downloaded.

Run by ``test_clients.py`` under ``torch.distributed.run``, with "trainer" or "trl" as its argument; ``--fsdp2``
installs fsdp2 first. Prints the losses.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch

if "--fsdp2" in sys.argv:
    import fsdp2

    fsdp2.install()

from accelerate import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS, LENGTH, VOCABULARY = 4, 12, 64


def model() -> LlamaForCausalLM:
    """Return a model of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes))


def data() -> list[dict[str, list[int]]]:
    """Rows of random tokens, the same in every run, as many as all steps of two ranks take."""
    tokens = torch.randint(VOCABULARY, (STEPS * 4, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in tokens]


def arguments(folder: str) -> dict[str, Any]:
    """What both trainers are given."""
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {
        "output_dir": folder,
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "fsdp_version": 2, "reshard_after_forward": True, **wrapped},
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def on_a_cpu(settings: TrainingArguments) -> TrainingArguments:
    """accelerate offers FSDP for accelerators only; it does what it must on a CPU as well once it is told otherwise."""
    assert settings.device.type == "cpu"
    PartialState().distributed_type = DistributedType.MULTI_GPU
    return settings


def trainer(which: str, folder: str) -> Trainer:
    """Return one of the two."""
    if which == "trainer":
        return Trainer(model=model(), args=on_a_cpu(TrainingArguments(**arguments(folder))), train_dataset=data())
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**arguments(folder), bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
    rows = Dataset.from_list(data())
    return SFTTrainer(model=model(), args=on_a_cpu(config), train_dataset=rows, processing_class=tokenizer())


def tokenizer() -> Any:
    """A tokenizer of numbers, which SFTTrainer wants to see."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    object_ = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=object_, pad_token="0", eos_token="1", unk_token="0")


def main(which: str) -> None:
    """Train and print one line of JSON on the first process."""
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(which, folder)
        one.train()
    kinds = sorted(
        f"{type(module).__mro__[1].__module__}.{type(module).__name__}"
        for module in one.model_wrapped.modules()
        if isinstance(module, FSDPModule)
    )
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    if one.is_world_process_zero():
        print("\n" + json.dumps({"units": kinds, "losses": losses}), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
