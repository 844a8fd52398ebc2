"""Optimizers of other packages that need whole matrices step on an fsdp2 model as in one process, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.optim.test_full_params import THIRD_PARTY, on_mesh, pair, resume, save, train
from tests.support.packages import needs
from tests.support.pool import POOL, on_ranks

pytestmark = [pytest.mark.slow, needs("pytorch_optimizer")]


@on_ranks(4)
@pytest.mark.parametrize("name", THIRD_PARTY)
@pytest.mark.parametrize("kind", ["one dimension", "hybrid", "tensor parallel"])
def test_steps_are_those_of_one_process(rank, world, name, kind):
    """Uneven matrices, of which some ranks hold nothing, pieces of pieces and copies."""
    train(*pair(name, on_mesh(kind)))


@pytest.mark.parametrize("name", ["pytorch_optimizer.SOAP", "pytorch_optimizer.Muon"])
def test_resume_on_fewer_ranks(tmp_path: Path, name: str) -> None:
    """A checkpoint of four ranks goes on on two."""
    POOL.run(4, save, {"path": str(tmp_path), "name": name}, 120.0)
    POOL.run(2, resume, {"path": str(tmp_path), "name": name, "with_torch": False}, 120.0)
