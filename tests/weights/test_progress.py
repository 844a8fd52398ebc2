"""Loading and saving show how far they are where they are asked to: on the first rank, in bytes."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

import fsdp2
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, plain, sharded, values_of

TINY = 100 / 2**20


def calls(rank, folder, values, progress):
    """Return what loads and saves, and how."""
    return {
        "broadcast_from_rank0": lambda module: fsdp2.broadcast_from_rank0(
            module, values if rank == 0 else None, bucket_mb=TINY, progress=progress
        ),
        "save_safetensors": lambda module: fsdp2.save_safetensors(module, folder, bucket_mb=TINY, progress=progress),
        "load_safetensors": lambda module: fsdp2.load_safetensors(module, folder, progress=progress),
    }


@on_ranks(1, 2)
def test_a_function_is_called(rank, world, tmp_path):
    """With the bytes that are through and all there are, ever more of them, and the last time with all."""
    values, seen = values_of(plain("mlp")), []
    nbytes = sum(value.nbytes for value in values.values())
    for name, call in calls(rank, tmp_path, values, lambda *now: seen.append(now)).items():
        module = sharded("mlp", meta=name != "save_safetensors")
        if name == "save_safetensors":
            fsdp2.broadcast_from_rank0(module, values)
        seen.clear()
        call(module)
        assert_holds(module, values)
        assert bool(seen) == (rank == 0), name
        if rank == 0:
            total = seen[0][1]
            assert [now[1] for now in seen] == [total] * len(seen) and seen[-1] == (total, total)
            assert all(one[0] < two[0] for one, two in zip(seen, seen[1:], strict=False)) and len(seen) > 3
            assert total == nbytes if name != "load_safetensors" else nbytes // world <= total <= nbytes


@on_ranks(2)
def test_a_bar(rank, world, tmp_path):
    """True shows one of tqdm's on the first rank; where tqdm is missing every rank raises, and nothing has changed."""
    values, bars = values_of(plain("mlp")), []

    def bar(**options):
        bars.append(mock.MagicMock(**options))
        bars[-1].__enter__.return_value = bars[-1]
        return bars[-1]

    fsdp2.save_safetensors(sharded("mlp", meta=False), tmp_path)
    for name, call in calls(rank, tmp_path, values, True).items():
        module = sharded("mlp", meta=False)
        with mock.patch.dict(sys.modules, {"tqdm.auto": mock.MagicMock(tqdm=bar)}):
            bars.clear()
            call(module)
        assert len(bars) == (rank == 0)
        if rank == 0:
            assert bars[0].desc == name and bars[0].unit == "B"
            assert sum(update.args[0] for update in bars[0].update.call_args_list) == bars[0].total > 0
        before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
        with mock.patch.dict(sys.modules, {"tqdm.auto": None}):
            with pytest.raises(ImportError, match="on rank 0: .*pip install tqdm"):
                call(module)
        assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before


@on_ranks(1, 2)
def test_what_is_no_progress(rank, world, tmp_path):
    """Refused by every rank before anything has changed; an error of the function is everybody's."""
    values = values_of(plain("mlp"))

    def fail(through, total):
        raise KeyError("no screen")

    fsdp2.save_safetensors(sharded("mlp", meta=False), tmp_path)
    for call in calls(rank, tmp_path, values, "bar").values():
        with pytest.raises(TypeError, match="progress must be True, False or a function"):
            call(sharded("mlp", meta=False))
    for call in calls(rank, tmp_path, values, fail).values():
        with pytest.raises((RuntimeError, KeyError), match="no screen"):
            call(sharded("mlp", meta=False))
