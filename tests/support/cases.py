"""The models of ``tests.support.models`` by name: test functions pass a name to their workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import api, models
from tests.support.models import Case, Through, children, linears, mlp, rows, tokens
from tests.support.shapes import KINDS, PLAIN_OBJECTS, Wraps


def in_the_middle(middle: type[nn.Module] | object, **options: object) -> Case:
    """A case with ``middle()`` between two linear units."""
    return Case(lambda: Through(middle()), rows(6), children, **options)  # type: ignore[arg-type, operator]


def wrapping(kind: str) -> Case:
    """Three units in a row that pass a container of one kind to each other; the root returns it."""
    return Case(
        lambda: nn.Sequential(*(Wraps(kind) for _ in range(3))),
        rows(6),
        children,
        torch_takes_it=kind not in PLAIN_OBJECTS and (api.torch_since("2.12") or "dataclass" not in kind),
    )


CASES: dict[str, Case] = {
    "mlp": Case(lambda: mlp(4, 8, 8, 4), rows(4), linears),
    "mlp_root_only": Case(lambda: mlp(4, 8, 4), rows(4)),
    "mlp_grouped": Case(
        lambda: mlp(4, 8, 8, 8, 4), rows(4), lambda model: [[model[0], model[2]], [model[4], model[6]]]
    ),
    "mlp_input_grad": Case(lambda: mlp(4, 8, 4), rows(4, grad=True), linears),
    "wide": Case(lambda: mlp(64, 512, 512, 64), rows(64), linears),
    "large": Case(lambda: mlp(256, 2100, 1024, 64), rows(256), linears),
    "nested": Case(
        lambda: nn.Sequential(mlp(6, 8, 6), mlp(6, 5, 6)), rows(6), lambda model: [model[0][0], model[0], model[1]]
    ),
    "transformer": Case(models.Transformer, tokens(5, 11), lambda model: list(model.blocks)),
    "transformer_grouped": Case(
        models.Transformer,
        tokens(5, 11),
        lambda model: [*model.blocks, [model.embed, model.norm, model.head]],
    ),
    "uneven": Case(lambda: mlp(3, 5, 17, 3), rows(3), linears),
    "smaller_than_world": Case(lambda: mlp(2, 1, 3, 2), rows(2), linears),
    "no_parameters": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows(4), children),
    "scalars": in_the_middle(lambda: models.Odd(scale=torch.randn(()), one=torch.randn(1)), torch_takes_it=False),
    "three_dims": in_the_middle(lambda: models.Odd(cube=torch.randn(3, 5, 2), row=torch.randn(1, 7))),
    "integer": in_the_middle(
        lambda: models.Odd(index=torch.arange(7), weight=torch.randn(5)), torch_takes_it=api.torch_since("2.12")
    ),
    "channels_last": Case(models.Image, rows(3, 6, 6), children, torch_takes_it=False),
    "non_contiguous": in_the_middle(models.Transposed, torch_takes_it=False),
    "mixed_frozen_dtypes": in_the_middle(
        lambda: models.MixedDtypes(trainable=False), torch_takes_it=api.torch_since("2.12")
    ),
    "mixed_dtypes": in_the_middle(lambda: models.MixedDtypes(trainable=True), torch_takes_it=False, low_precision=True),
    "tied": in_the_middle(models.Tied),
    "used_several_times": Case(models.Recurrent, rows(6), lambda model: [model.cell]),
    "frozen": Case(models.Frozen, rows(6), lambda model: list(model.layers)),
    "frozen_all": Case(lambda: mlp(4, 8, 4).requires_grad_(False), rows(4, grad=True), linears),
    "skipping": Case(models.Skipping, rows(6), children),
    "no_arguments": Case(models.UsesConstant, rows(6), children),
    "view_in_place": Case(models.ViewInPlace, rows(6), children, torch_takes_it=False),
    "keywords": Case(models.Keywords, rows(6), children, keywords=lambda inputs: {"x": inputs[0], "twice": True}),
    "casts_its_inputs": Case(lambda: nn.Sequential(models.Casting(4, 6), models.Casting(6, 4)), rows(4), children),
    "parameter_lists": in_the_middle(models.Listed),
    **{
        f"checkpoint_{name}": Case(
            lambda options=options: models.Recomputed(*options), rows(6), lambda model: list(model.layers)
        )
        for name, options in {
            "inside": (False, False),
            "inside_reentrant": (False, True),
            "around": (True, False),
        }.items()
    },
    "lstm": Case(lambda: Through(nn.LSTM(6, 6, batch_first=True)), rows(3, 6), children),
    "buffers": in_the_middle(models.Counting),
    "batch_norm": in_the_middle(lambda: nn.BatchNorm1d(6), rows_couple=True),
    **{f"wrapping_{kind}": wrapping(kind) for kind in KINDS},
}


def parametrize_cases(*names: str) -> Any:
    """Return the mark that runs a test for each named case; those that torch refuses are promised by fsdp2 only."""
    marks = {name: [] if CASES[name].torch_takes_it else [api.fsdp2_only] for name in names}
    return pytest.mark.parametrize("case", [pytest.param(name, marks=marks[name]) for name in names])
