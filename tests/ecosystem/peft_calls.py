"""What people call on a sharded PEFT model beside its forward: generate, save_pretrained, merge_adapter.

Run by ``test_peft.py`` under ``torch.distributed.run``; prints one line of JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

import fsdp2
from tests.ecosystem.peft_adapter import build, config, data


def sharded(*, dora: bool = False) -> PeftModel:
    """The tiny model, each layer and the PeftModel a unit."""
    model = build(config(dora))
    for layer in model.base_model.model.model.layers:
        fsdp2.fully_shard(layer)
    return fsdp2.fully_shard(model)


def generated(model: PeftModel) -> list[list[int]]:
    """A few tokens."""
    return model.generate(input_ids=data(0), max_new_tokens=4, do_sample=False).tolist()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value of a parameter."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def saved() -> dict[str, Any]:
    """Which values of a second adapter, added after sharding and trained, are in the files."""
    model = sharded()
    model.add_adapter("second", config())
    model.set_adapter("second")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=data(0), labels=data(0)).loss.backward()
    optimizer.step()
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.save_pretrained(box[0], is_main_process=dist.get_rank() == 0)
    dist.barrier()
    files = load_file(Path(box[0], "second", "adapter_model.safetensors"))
    named = {name.replace(".second", ""): full(value) for name, value in model.named_parameters() if ".second." in name}
    return {"names": files.keys() == named.keys(), "equal": all(torch.equal(files[n], named[n]) for n in named)}


def merged(dora: bool) -> dict[str, float]:
    """How far a merged model is from one that was merged in one process, and its output from that before merging."""
    alone, model = build(config(dora)), sharded(dora=dora)
    before = model(input_ids=data(0)).logits.detach()
    alone.merge_adapter()
    with fsdp2.summon_full_params(model):
        model.merge_adapter()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    weights = max(float((full(one) - other.detach()).abs().max()) for one, other in pairs)
    outputs = float((model(input_ids=data(0)).logits - before).detach().abs().max())
    with fsdp2.summon_full_params(model):
        model.unmerge_adapter()
    again = float((model(input_ids=data(0)).logits - before).detach().abs().max())
    return {"weights": weights, "outputs": outputs, "unmerged": again}


def main() -> None:
    """Call everything."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"alone": generated(build())}
    model = sharded()
    with fsdp2.use_weights(model):
        found["use_weights"] = generated(model)
    fsdp2.register_fsdp_forward_method(model, "generate")
    found["registered"] = generated(model)
    model(input_ids=data(0), labels=data(0)).loss.backward()
    found["after training"] = generated(model)
    found |= {"saved": saved(), "lora": merged(False), "dora": merged(True)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
