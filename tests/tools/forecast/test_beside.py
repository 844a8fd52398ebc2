"""One script with fsdp2's fully_shard and with torch's own, side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import forecast, fully_shard
from fsdp2 import fully_shard as shard
from fsdp2.__main__ import main
from tests.support import api

pytestmark = api.fsdp2_only
WIDTH, LAYERS = 1 << 10, 4
LAYER = WIDTH * WIDTH * 4


def model() -> nn.Sequential:
    """Return a model of layers, 4 MiB each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def build(mesh: Any) -> tuple[Any, Any]:
    """Shard with the name that this file imported."""
    made = model()
    for unit in (*made, made):
        fully_shard(unit, mesh=mesh)
    return made, torch.optim.AdamW(made.parameters())


def builds_with_torchs(mesh: Any) -> tuple[Any, Any]:
    """Shard with torch's own, as somebody does who has not switched yet."""
    made = model()
    for unit in (*made, made):
        torch_fully_shard(unit, mesh=mesh)
    return made, torch.optim.AdamW(made.parameters())


def builds_with_attributes(mesh: Any) -> tuple[Any, Any]:
    """Shard with attributes of the package and an alias, with policies, and with what it exports."""
    made = model()
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in made:
        shard(layer, mesh=mesh, mp_policy=policy, compression=None)
    fsdp2.fully_shard(made, mesh=mesh, mp_policy=policy)
    assert isinstance(made, fsdp2.FSDPModule)
    return made, torch.optim.AdamW(made.parameters())


def step(made: Any, optimizer: Any) -> None:
    """Train once."""
    made(torch.empty(8, WIDTH)).sum().backward()
    fsdp2.clip_grad_norm_(made.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", [build, builds_with_torchs, builds_with_attributes])
def test_what_switching_gains(how):
    """Both run the same script, whichever of the two it imports; names are as they were when it is over.

    Ours gathers the last layer once, theirs once more for backward.
    """
    before = (fully_shard, fsdp2.fully_shard, torch_fully_shard, torchs.fully_shard)
    result = forecast(how, step, mesh={"shard": 8}, beside="torch")
    assert (fully_shard, fsdp2.fully_shard, torch_fully_shard, torchs.fully_shard) == before
    theirs = result.beside
    assert theirs is not None and theirs.beside is None
    assert theirs.bytes_by_kind["shards"] == result.bytes_by_kind["shards"]
    assert theirs.bytes_by_kind["optimizer state"] == result.bytes_by_kind["optimizer state"]
    last = LAYER // 2 if how is builds_with_attributes else LAYER  # that one computes in bfloat16
    assert theirs.sent_bytes == pytest.approx(result.sent_bytes + last, rel=1e-5)  # ours also sends a norm's counts
    assert theirs.launches != result.launches or theirs.pools != result.pools, "both ran with the same library"
    assert theirs.bytes_by_kind["gathered"] > 0 and theirs.bytes_by_kind["gradients"] > 0
    assert theirs.peak.running.startswith("backward of ")
    assert set(theirs.exposed_by_unit) <= {"", *map(str, range(LAYERS))} and theirs.exposed_by_unit
    for one in (result, theirs):
        assert one.reserved_bytes == sum(one.pools.values()) >= one.peak_bytes
        units = sorted((s.kind, s.unit) for s in one.timeline.spans if s.lane == "units" and s.unit)
        assert units == [(kind, str(i)) for kind in ("backward", "forward") for i in range(LAYERS)]
        assert {s.lane for s in one.timeline.spans if s.ranks} >= {"gather", "reduce"}


def test_tables(capsys, tmp_path):
    """A column for each, and both timelines in one picture; several settings get a row for each."""
    command = [
        "forecast",
        "tests.tools.forecast.test_beside:build",
        "--mesh",
        "shard=8",
        "--beside",
        "torch",
        "--steps",
        "2",
    ]
    assert main([*command, "--save", str(tmp_path / "both.json")]) == 0
    text = capsys.readouterr().out
    rows = {line[:26].strip(): line.split()[-3:] for line in text.splitlines() if len(line.split()) > 3}
    for name in ("peak memory, MiB", "reserved, MiB", "sent, MiB", "launches", "exposed communication"):
        ours, theirs, ratio = (float(cell.replace(",", "")) for cell in rows[name])
        assert ratio == pytest.approx(ours / theirs, rel=0.02)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "forecast, h100, rank 0",
        "forecast, h100, torch's own, rank 0",
    }
    assert main([*command, "--mesh", "shard=16", "--fit", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert text.count("the same with torch's own") == 2 and text.count("  fits") == 4
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["beside"]["reserved_bytes"] > 0 and "timeline" not in values["beside"]


def uses(what: Any) -> Any:
    """Return a build function that does something to a sharded layer first."""

    def builds(mesh: Any) -> Any:
        made = model()
        what(made, mesh)
        fsdp2.fully_shard(made, mesh=mesh)
        return made

    return builds


def keeps_a_copy(mesh: Any, sharding: Any = fully_shard) -> Any:
    """Use a default argument, which nobody can replace."""
    made = model()
    for unit in (*made, made):
        sharding(unit, mesh=mesh)
    return made


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            lambda made, mesh: fully_shard(made[0], mesh=mesh, compression=fsdp2.CompressionPolicy(gather=torch.int8)),
            r"fully_shard\(compression=\.\.\.\), which torch's own",
        ),
        (lambda made, mesh: fully_shard(made[0], mesh=mesh, mp_policy={}), "policy for each parameter"),
        (lambda made, mesh: fully_shard(made[0], mesh=mesh, offload_policy={}), r"offload_policy=.*for each parameter"),
        (lambda made, mesh: fully_shard(made[0], mesh=mesh, shard_placement_fn="auto"), "shard_placement_fn='auto'"),
        (
            lambda made, mesh: fsdp2.plan_units(made, policy="auto"),
            r"uses fsdp2\.plan_units, which .*test_beside\.py, line \d+: ",
        ),
        (lambda made, mesh: fully_shard(made[0], mesh=mesh).set_compression(None), r"FSDPModule\.set_compression"),
        (lambda made, mesh: fully_shard(made[0], mesh=mesh).reshard(recurse=True), r"FSDPModule\.reshard\(recurse="),
        (
            lambda made, mesh: fully_shard(nn.Linear(10, 8), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
            "uneven",
        ),
        (None, "the root unit was made by fsdp2's fully_shard.*default argument"),
    ],
)
def test_what_torchs_lacks(what, text):
    """The error names it, and the line where the script uses it."""
    how = uses(what) if what else keeps_a_copy
    with pytest.raises(RuntimeError, match=f'(?s)beside="torch": the script runs with fsdp2\'s.*{text}'):
        forecast(how, lambda made, optimizer: made(torch.empty(8, WIDTH)), mesh={"shard": 8}, beside="torch")


def test_a_wrong_library():
    """There is one library beside fsdp2."""
    with pytest.raises(ValueError, match="beside='deepspeed'; expected .* None or \"torch\""):
        forecast(build, step, mesh={"shard": 8}, beside="deepspeed")
