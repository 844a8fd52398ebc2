"""torchtitan's trainer computes the same with fsdp2 installed: bit for bit where its gradients are reduced at once, or
computed in the dtype in which they accumulate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.launching import run
from tests.support import api
from tests.support.packages import needs

pytestmark = [api.fsdp2_only, pytest.mark.slow, needs("torchtitan", "triton")]

Seen = list[dict[str, Any]]
CHUNKED, PIPELINE = ("--loss", "chunked"), ("--schedule", "1F1B")
"""Gradients accumulate on full parameters: of the output layer, over chunks of the sequence, and of whole stages, over
micro-batches."""


def train(folder: Path, *options: str) -> Seen:
    """Train on two processes, or two for each stage of a pipeline, and return what each saw."""
    ranks = 4 if "--schedule" in options else 2
    (target := folder / "-".join(option.strip("-") for option in options or ["torch"])).mkdir()
    text = run("titan_trainer", str(target), *options, ranks=ranks)
    saved = [target / f"rank{rank}.pt" for rank in range(ranks)]
    assert all(path.exists() for path in saved), text
    seen: Seen = [torch.load(path) for path in saved]
    home = "fsdp2" if "--fsdp2" in options else "torch"
    assert all(one["units"] == [home] and len(one["gradients"]) == 3 for one in seen)
    return seen


def different(ours: Seen, theirs: Seen, steps: int) -> set[str]:
    """Return the names of the parameters whose gradients differ on some rank in one of the first ``steps``."""
    return {
        name
        for one, other in zip(ours, theirs)
        for mine, yours in zip(one["gradients"][:steps], other["gradients"][:steps])
        for name in mine
        if not torch.equal(mine[name], yours[name])
    }


def assert_equal(ours: Seen, theirs: Seen) -> None:
    """Compare everything that was seen, bit for bit."""
    for one, other in zip(ours, theirs, strict=True):
        assert one["losses"] == other["losses"] and torch.equal(*(torch.stack(run["norms"]) for run in (one, other)))
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    assert not different(ours, theirs, 3)


@pytest.mark.parametrize("options", [(), (*CHUNKED, "--dtype", "float32"), (*PIPELINE, "--dtype", "float32")])
def test_every_bit_is_equal(tmp_path, options):
    """In bfloat16 where each backward is reduced; in float32, where nothing is rounded, with accumulation too."""
    assert_equal(train(tmp_path, "--fsdp2", *options), train(tmp_path, *options))


@pytest.mark.parametrize("options", [CHUNKED, PIPELINE], ids=["chunked loss", "1F1B"])
def test_what_accumulates_is_not_rounded(tmp_path, options):
    """In bfloat16 runs with a chunked loss and with a pipeline differed from torch's. The first gradients to differ are
    those of RMSNorms, which autograd computes in float32, by no more than torch's rounding of them to bfloat16. Where
    they are rounded in our run as well, both are equal bit for bit, to the end."""
    theirs, ours = train(tmp_path, *options), train(tmp_path, "--fsdp2", *options)
    names = different(ours, theirs, 1)
    assert names and all(name.endswith("norm.weight") for name in names)
    for one, other in zip(ours, theirs):
        for name in names & one["gradients"][0].keys():
            mine, yours = (seen["gradients"][0][name] for seen in (one, other))
            assert (mine - yours).norm() <= torch.finfo(torch.bfloat16).eps / 2 * yours.norm()
    assert_equal(train(tmp_path, "--fsdp2", "--rounded", *options), theirs)
