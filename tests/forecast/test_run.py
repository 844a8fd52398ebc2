"""The forecast as an object, on the command line, and what it says of code that it cannot run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.__main__ import main
from fsdp2.forecasting.cost import H100
from fsdp2.forecasting.run import forecast
from tests.support import api

pytestmark = api.fsdp2_only
WIDTH = 1 << 12


def build(mesh: Any) -> tuple[Any, Any]:
    """Return a model of layers that are units, 64 MiB each, and its optimizer."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any) -> None:
    """Train once."""
    model(torch.empty(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_figures():
    """Shards, optimizer state and what is gathered are as long as arithmetic says; nothing is made in memory."""
    result = forecast(build, step, mesh={"replicate": 2, "shard": 8})
    layer = WIDTH * WIDTH * 4
    assert result.bytes_by_kind["shards"] == pytest.approx(4 * layer / 8, rel=0.001)
    assert result.bytes_by_kind["optimizer state"] == pytest.approx(2 * 4 * layer / 8, rel=0.001)
    assert 2 * layer <= result.bytes_by_kind["gathered"] <= 2.1 * layer
    assert result.peak.running.startswith("backward of ")
    sent = {(one.axis, one.kind): (one.launches, one.nbytes) for one in result.collectives}
    assert sent == {
        ("replicate", "all_reduce"): (4, 4 * layer // 8),
        ("shard", "all_gather"): (8, 8 * layer),
        ("shard", "reduce_scatter"): (4, 4 * layer),
    }
    assert result.padding_bytes == 0
    assert result.exposed_seconds == pytest.approx(result.step_seconds - result.compute_seconds)
    assert sum(result.exposed_by_unit.values()) == pytest.approx(result.exposed_seconds, rel=0.1)


def test_command_line(capsys):
    """A table for people, or json; constants can be set."""
    command = [
        "forecast",
        "tests.forecast.test_run:build",
        "--mesh",
        "shard=8",
        "--set",
        "memory_bytes_per_second=1e12",
    ]
    main(command)
    table = capsys.readouterr().out
    for text in ("one rank of shard 8", "optimizer state", "shard all_gather", "memory_bytes_per_second = 1e+12"):
        assert text in table
    main([*command, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"] == {"shard": 8} and values["peak"]["by_kind"]["shards"] > 0
    assert str(H100) not in table


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tests.forecast.test_run:build", "--mesh", "shard"], "expected NAME=SIZE"),
        (["tests.forecast.test_run:nothing", "--mesh", "shard=8"], "no function 'nothing'"),
        (["no_such_module:build", "--mesh", "shard=8"], "no_such_module"),
        (["tests.forecast.test_run:build", "--mesh", "shard=8", "--set", "speed=1"], "flops_per_second"),
    ],
)
def test_command_lines_that_are_wrong(capsys, arguments, text):
    """The error says what was expected."""
    with pytest.raises(SystemExit):
        main(["forecast", *arguments])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (lambda x: x.sum().item(), "runs without values.*item"),
        (lambda x: x.nonzero(), "runs without values"),
        (lambda x: x.to("cuda"), "needs no device"),
    ],
)
def test_code_that_needs_more(code, text):
    """Values and devices do not exist; the error says what to change."""

    def looks(model: Any, optimizer: Any) -> None:
        code(model(torch.empty(8, WIDTH)))

    if torch.backends.cuda.is_built() and "device" in text:
        pytest.skip("fake tensors can be on one")
    with pytest.raises(RuntimeError, match=text):
        forecast(build, looks, mesh={"shard": 8})
