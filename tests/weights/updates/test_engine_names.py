"""Rules that give the names of vLLM's and SGLang's models, and buckets in the form that SGLang reads.

The tables are facts of the engines' source: which projections their models stack, in which order, what their loaders
call experts, and how SGLang describes a flat bucket. No engine is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import WeightReceiver, WeightSender
from tests.support import api
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
STACKED: dict[str, dict[str, tuple[str, ...]]] = {
    # stacked_params_mapping of load_weights, and packed_modules_mapping, in vllm/model_executor/models/; it is the same
    # in sglang/srt/models/, for each of these files
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


class Experts(nn.Module):
    """The experts of a layer as transformers 5 keeps them: gates and ups in one stack, downs in another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 6))


@on_ranks(2, 3)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_by_number(rank, world, delta, dim):
    """Loaders of vLLM and SGLang take gate, up and down of each expert under a name of its own, as files of Qwen3-MoE
    have them (``make_expert_params_mapping``). A stack of both gate and up was refused."""
    torch.manual_seed(0)
    model = nn.Module()
    model.mlp = nn.ModuleDict({"experts": Experts()})
    plain = {name: value.detach().clone() for name, value in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=mesh_1d(), shard_placement_fn=lambda param: Shard(dim))
    rules = {
        "*.experts.gate_up_proj": ("*.experts.{}.gate_proj.weight", "*.experts.{}.up_proj.weight"),
        "*.experts.down_proj": "*.experts.{}.down_proj.weight",
    }
    receiver = WeightReceiver()
    sender = WeightSender(model, mapping=rules, delta=delta)
    sender.send(receiver.apply)
    with torch.no_grad():
        model.mlp.experts.gate_up_proj.to_local()[..., 0].mul_(2)
    sender.send(receiver.apply)
    if dist.get_rank() != 0:
        return
    plain["mlp.experts.gate_up_proj"][..., 0] *= 2
    expected = {}
    for number in range(3):
        for name, value in zip(GATE_UP, plain["mlp.experts.gate_up_proj"][number].chunk(2), strict=True):
            expected[f"mlp.experts.{number}.{name}.weight"] = value
        expected[f"mlp.experts.{number}.down_proj.weight"] = plain["mlp.experts.down_proj"][number]
    assert receiver.tensors.keys() == expected.keys()
    assert all(torch.equal(receiver.tensors[name], value) for name, value in expected.items())


@dataclass
class Metadata:
    """The fields of ``FlattenedTensorMetadata`` in sglang/srt/weight_sync/tensor_bucket.py; indices are of bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def reconstructed(flattened: torch.Tensor, metadata: list[Metadata]) -> dict[str, torch.Tensor]:
    """Return what ``reconstruct_tensors`` of that file makes of a bucket."""
    return {
        one.name: flattened[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape).clone() for one in metadata
    }


@on_ranks(2)
def test_buckets_in_the_form_of_sglang(rank, world):
    """The three ways into SGLang, made of a bucket as docs/weight_sync.md says: named tensors, one flat tensor with
    metadata, and names, dtypes and shapes of what follows by broadcast."""
    torch.manual_seed(0)
    model = Decoder("qwen3")
    plain = {name: value.detach().to(torch.bfloat16) for name, value in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=mesh_1d())
    ways: list[dict[str, torch.Tensor]] = [{}, {}, {}]

    def deliver(bucket: fsdp2.WeightBucket) -> None:
        named = [*bucket.tensors()]
        ways[0].update((name, tensor.clone()) for name, tensor in named)
        metadata = []
        for name, tensor in named:
            begin = tensor.storage_offset() * tensor.itemsize - bucket.buffer.storage_offset()
            end = begin + tensor.nbytes
            metadata.append(Metadata(name, tensor.shape, tensor.dtype, begin, end, tensor.nbytes))
        ways[1].update(reconstructed(bucket.buffer, metadata))
        request = {"names": bucket.names, "shapes": [list(shape) for shape in bucket.shapes]}
        request["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes]
        request = json.loads(json.dumps(request))
        sent = [tensor for _, tensor in named]
        for name, dtype, shape, tensor in zip(*(request[key] for key in ("names", "dtypes", "shapes")), sent):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            assert weight.shape == tensor.shape and weight.dtype == tensor.dtype
            ways[2][name] = weight.copy_(tensor)

    WeightSender(model, dtype=torch.bfloat16, bucket_mb=0.001).send(deliver)
    for found in ways if rank == 0 else ():
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], value) for name, value in plain.items())
