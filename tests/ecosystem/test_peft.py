"""PEFT's adapters on a sharded model are saved as on a plain one, and a save of shards names the remedy.

Optional: ``pip install peft transformers``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.processes import loopback

MISSING = [name for name in ("peft", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")

PROGRAM = """
import sys, torch, torch.distributed as dist
import fsdp2
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from transformers import LlamaConfig, LlamaForCausalLM

how, when, folder, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base, config) if when == "before" else base
for unit in (*base.model.layers, base):
    fsdp2.fully_shard(unit, mesh=mesh)
model = get_peft_model(base, config) if when == "after" else model
tokens = torch.randint(64, (2, 8))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
first = rank == 0
if how == "shards":
    model.save_pretrained(folder)
elif how == "full":
    with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.save_pretrained(folder, is_main_process=first)
elif how == "summoned":
    with fsdp2.summon_full_params(model, writeback=False):
        model.save_pretrained(folder, is_main_process=first)
else:
    settings = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
        state = model.state_dict()
    if first:
        model.save_pretrained(folder, state_dict=state)
dist.barrier()
saved = load_file(folder + "/adapter_model.safetensors")
expected = {n.replace(".default", ""): t for n, t in fsdp2.iter_full_params(model) if "lora" in n}
assert sorted(saved) == sorted(expected) and expected
assert all(torch.equal(saved[name], value) for name, value in expected.items())
print("saved", flush=True)
"""


def run(how: str, when: str, folder: str) -> list[str]:
    """Return what two processes printed."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": loopback(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how, when, folder, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["full", "summoned", "given"])
def test_adapters_are_saved(how, when, tmp_path):
    """``save_pretrained`` writes whole adapters, added before or after sharding, in each of three ways."""
    for output in run(how, when, str(tmp_path)):
        assert "saved" in output.splitlines(), output


def test_shards_are_no_file(tmp_path):
    """Without a setting the state dict holds shards, which safetensors cannot write; the log says what to do."""
    for output in run("shards", "before", str(tmp_path)):
        assert "invalid python storage" in output and "fsdp2.state_dict_type(model" in output, output
