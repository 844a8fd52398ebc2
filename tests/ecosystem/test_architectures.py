"""``policy="auto"`` on the architectures that docs/tutorials/finetune.md lists.

The loss and gradients of small models are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.support import api
from tests.support.packages import needs
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

pytestmark = [api.fsdp2_only, pytest.mark.slow, needs("transformers")]

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
GROUPED = {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 64}
ENCODER_DECODER = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3}
WHISPER = {
    **ENCODER_DECODER,
    "vocab_size": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": GROUPED,
    "mixtral": {**GROUPED, **EXPERTS},
    "gemma2": {**GROUPED, "head_dim": 8},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
}
MORE = ("t5", "whisper", "llava", "bert")
LAYERS = {"t5": 6, "whisper": 6, "llava": 6}
"""Blocks that become units; three where nothing is listed."""


def model_of(name: str) -> nn.Module:
    """Return a small model of an architecture, the same on every rank, without dropout."""
    import transformers

    torch.manual_seed(0)
    if name in CAUSAL:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **CAUSAL[name]))
    elif name == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    elif name == "whisper":
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    elif name == "llava":
        vision = transformers.CLIPVisionConfig(**WIDTHS, image_size=8, patch_size=4)
        language = transformers.LlamaConfig(**GROUPED)
        config = transformers.LlavaConfig(
            vision_config=vision, text_config=language, image_token_index=63, vision_feature_layer=-1
        )
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **WIDTHS))
    return model.eval()  # no dropout


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward with a loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 12), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": tokens}
    if name == "llava":
        tokens[:, :4] = 63  # the places of the four patches of an image
        labels = tokens.masked_fill(tokens == 63, -100)
        return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": labels}
    return {"input_ids": tokens, "labels": tokens}


def trained(model: nn.Module, name: str) -> torch.Tensor:
    """Return the loss of a forward after its backward."""
    loss = model(**batch_of(name)).loss
    loss.backward()
    return loss.detach()


@on_ranks(2)
@pytest.mark.parametrize("name", [*CAUSAL, *MORE])
def test_policy_auto(rank, world, name):
    """Every block is a unit, and what the ranks compute from one batch is what one process computes."""
    alone, model = model_of(name), model_of(name)
    plan = fsdp2.plan_units(model, "auto")
    assert len(plan) == LAYERS.get(name, 3) + 1, str(plan)
    fsdp2.fully_shard(model, policy="auto", mesh=mesh_1d())
    torch.testing.assert_close(trained(model, name), trained(alone, name))
    for (key, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda text, key=key: f"{key}: {text}")
