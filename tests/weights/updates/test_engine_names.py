"""Rules that give the parameters of vLLM's models, where an engine is written to in place instead of by its loader.

The tables are facts of vLLM's source: which projections its models stack, in which order. vLLM is not needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import WeightReceiver, WeightSender
from tests.support import api
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
STACKED: dict[str, dict[str, tuple[str, ...]]] = {
    # stacked_params_mapping of load_weights, and packed_modules_mapping, in vllm/model_executor/models/
    "llama": {"qkv_proj": QKV, "gate_up_proj": GATE_UP},  # llama.py
    "qwen2": {"qkv_proj": QKV, "gate_up_proj": GATE_UP},  # qwen2.py; q, k and v have biases
    "qwen3": {"qkv_proj": QKV, "gate_up_proj": GATE_UP},  # qwen3.py; q_norm and k_norm stay alone
    "mixtral": {"qkv_proj": QKV},  # mixtral.py; the experts' w1 and w3 are of one tensor for all, by the loader alone
}


def joined(stacked: dict[str, tuple[str, ...]]) -> dict[Any, Any]:
    """Return rules that join each list of projections, with their biases."""
    return {
        tuple(f"*.{part}.{kind}" for part in parts): f"*.{name}.{kind}"
        for name, parts in stacked.items()
        for kind in ("weight", "bias")
    }


class Layer(nn.Module):
    """A decoder layer under the names of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        bias = kind == "qwen2"
        sizes = {"q_proj": 16, "k_proj": 4, "v_proj": 4}
        self.self_attn = nn.ModuleDict({name: nn.Linear(8, rows, bias=bias) for name, rows in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(16, 8, bias=False)
        if kind == "qwen3":
            self.self_attn.update({name: nn.RMSNorm(4) for name in ("q_norm", "k_norm")})
        if kind == "mixtral":
            experts = [nn.ModuleDict({name: nn.Linear(8, 8) for name in ("w1", "w2", "w3")}) for _ in range(2)]
            self.block_sparse_moe = nn.ModuleDict({"gate": nn.Linear(8, 2), "experts": nn.ModuleList(experts)})
        else:
            self.mlp = nn.ModuleDict({name: nn.Linear(8, 12, bias=False) for name in GATE_UP})
            self.mlp["down_proj"] = nn.Linear(12, 8, bias=False)


class Decoder(nn.Module):
    """Two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Layer(kind) for _ in range(2)), "norm": nn.RMSNorm(8)})


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", list(STACKED))
@pytest.mark.parametrize("delta", [False, True])
def test_stacked_projections(rank, world, kind, delta):
    """Of q, k and v one parameter, of gate and up another, in this order, and everything else under its own name."""
    torch.manual_seed(0)
    model = Decoder(kind)
    plain = {name: value.detach().clone() for name, value in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=mesh_1d())
    rules = joined(STACKED[kind])
    if kind != "qwen2":
        rules = {parts: name for parts, name in rules.items() if not name.endswith("bias")}
    else:
        rules = {parts: name for parts, name in rules.items() if name != "*.gate_up_proj.bias"}
    receiver = WeightReceiver()
    WeightSender(model, mapping=rules, delta=delta).send(receiver.apply)
    if dist.get_rank() != 0:
        return
    expected = dict(plain)
    for name, parts in STACKED[kind].items():
        for one in [name for name in plain if f".{parts[0]}." in name]:
            pieces = [expected.pop(one.replace(parts[0], part)) for part in parts]
            expected[one.replace(parts[0], name)] = torch.cat(pieces)
    assert receiver.tensors.keys() == expected.keys()
    assert "model.layers.1.self_attn.qkv_proj.weight" in expected
    assert all(torch.equal(receiver.tensors[name], value) for name, value in expected.items())
