"""A training loop of HuggingFace accelerate with FSDP2 on a tiny transformers model made here, not downloaded.

Run by ``test_clients.py`` under ``torch.distributed.run``; ``--fsdp2`` installs fsdp2 first. Prints the losses.
"""

from __future__ import annotations

import json
import sys

import torch

if "--fsdp2" in sys.argv:
    import fsdp2

    fsdp2.install()

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, LENGTH, VOCABULARY = 4, 4, 12, 64


def data() -> torch.utils.data.DataLoader:
    """Return batches of random tokens, the same in every run."""
    tokens = torch.randint(VOCABULARY, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=ROWS // 2)


def model() -> LlamaForCausalLM:
    """Return a model of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train and print one line of JSON on the first process."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    # accelerate offers FSDP for accelerators only; it does what it must on a CPU as well once it is told otherwise.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    original = model()
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2)
    sharded, optimizer, loader = accelerator.prepare(original, optimizer, data())
    losses = []
    for (tokens,) in loader:
        loss = sharded(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    kinds = sorted(
        f"{type(module).__mro__[1].__module__}.{type(module).__name__}"
        for module in sharded.modules()
        if isinstance(module, torch.distributed.fsdp.FSDPModule)
    )
    if accelerator.is_main_process:
        print(json.dumps({"units": kinds, "losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
