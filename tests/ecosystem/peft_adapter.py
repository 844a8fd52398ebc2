"""A second PEFT adapter that is added to a sharded model: its values and gradients, as one line of JSON.

Run by ``test_peft.py``: alone, or under ``torch.distributed.run`` with ``fsdp2`` or ``torch`` as its argument.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

WORLD = 2


def config(dora: bool = False) -> LoraConfig:
    """Adapters of both projections whose values are random."""
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_dora=dora)


def data(rank: int) -> torch.Tensor:
    """The tokens of one rank."""
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(rank))


def build(adapter: LoraConfig | None = None) -> torch.nn.Module:
    """A tiny model with one adapter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    return get_peft_model(LlamaForCausalLM(llama), adapter or config())


def main(which: str) -> None:
    """Shard, add the second adapter, and go back once."""
    model = build()
    ranks = range(WORLD)
    if which != "alone":
        dist.init_process_group("gloo")
        ranks = range(dist.get_rank(), dist.get_rank() + 1)
        if which == "fsdp2":
            from fsdp2 import fully_shard
        else:
            from torch.distributed.fsdp import fully_shard
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    torch.manual_seed(1)
    model.add_adapter("second", config())
    model.set_adapter("second")
    for rank in ranks:
        (model(input_ids=data(rank), labels=data(rank)).loss / len(ranks)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            both = (parameter.detach(), parameter.grad)
            found[name] = [(t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist() for t in both]
    if which == "alone" or dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    if which != "alone":
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
