"""PEFT adapters that are added to a sharded model train as they do in one process."""

from __future__ import annotations

import pytest
import torch

from tests.ecosystem.launching import launch
from tests.support import api
from tests.support.packages import needs

pytestmark = [api.fsdp2_only, pytest.mark.slow, needs("peft", "transformers")]


def run(which: str) -> dict[str, list[torch.Tensor]]:
    """Values and gradients of the second adapter, by name, on the first rank."""
    found = launch("peft_adapter", which, alone=which == "alone")
    return {name: [torch.tensor(values) for values in both] for name, both in found.items()}


def test_a_second_adapter_added_after_sharding():
    """Its gradients were found to differ from torch's. They are those of one process: torch manages no parameter that
    is added later, so each rank goes on with the gradient of its own data."""
    alone, ours, theirs = map(run, ("alone", "fsdp2", "torch"))
    assert len(alone) == 8 and all(".second." in name for name in alone)
    assert alone.keys() == ours.keys() == theirs.keys()
    for name, (value, gradient) in alone.items():
        torch.testing.assert_close(ours[name][0], value, rtol=0, atol=0)
        torch.testing.assert_close(ours[name][1], gradient)
    assert any(not torch.allclose(theirs[name][1], gradient) for name, (_, gradient) in alone.items())


def test_methods_beside_forward():
    """``generate`` of a PeftModel is no forward of a unit, ``save_pretrained`` writes what ``state_dict`` returns, and
    DoRA's ``merge_adapter`` assigns ``.data``: called as they are, they raise on a sharded model. docs/clients.md says
    how to call them, for adapters that were added after sharding too."""
    found = launch("peft_calls")
    assert found["use_weights"] == found["registered"] == found["after training"] == found["alone"]
    assert found["saved"] == {"names": True, "equal": True}
    for kind in ("lora", "dora"):
        assert found[kind]["weights"] == 0 and max(found[kind].values()) < 1e-5, found[kind]
