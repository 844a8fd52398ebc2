"""Names of the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2.weights.names import clean_name
from fsdp2.weights.select import select


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("weight", "weight"),
        ("a._orig_mod.b._checkpoint_wrapped_module.weight", "a.b.weight"),
        ("_orig_mod._orig_mod.x", "x"),
        ("my_orig_mod.x", "my_orig_mod.x"),
        ("", ""),
    ],
)
def test_whole_parts_are_left_out(name: str, clean: str) -> None:
    assert clean_name(name) == clean


def test_every_name_of_a_parameter_is_found_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(checkpoint_wrapper(nn.Linear(2, 2, bias=False))))
    model.append(model[0])
    places = select(model, "test").places
    assert [place.names for place in places] == [["0.weight", "2.weight"], ["0.bias", "2.bias"], ["1.weight"]]
    assert all(place.tensor is param for place, param in zip(places, model.parameters()))
