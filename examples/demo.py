"""The main job, start to finish: train on some processes, save, and go on from there on another number of them.

It ends with the last step as it was recorded, beside its forecast.

python examples/demo.py                    # or: make demo
python examples/demo.py --text FILE        # any option of train_gpt.py; it goes to the first of the two runs
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path

import torch

from gpt.options import parse
from gpt.processes import UserError, complain, launch
from gpt.screen import heading

SCRIPT = Path(__file__).resolve().with_name("train_gpt.py")
OURS = ("--ranks", "--resume", "--stop-at")  # what this program decides; everything else may be given


def main(arguments: list[str]) -> int:
    """The exit status: 0, that of the first run that failed, or 2 after one line that says what was wrong."""
    try:
        options = parse(arguments)
        if taken := [name for name in OURS if name in arguments]:
            raise UserError(f"{taken[0]} is for train_gpt.py; demo.py decides it itself")
    except UserError as error:
        return complain(error, "demo.py")
    out = options.out or Path("runs", datetime.now().strftime("demo-%Y-%m-%d-%H%M%S"))
    return _two_runs(arguments, out, options.settings(None).steps)


def _two_runs(arguments: list[str], out: Path, steps: int) -> int:
    began = time.perf_counter()
    stop_at = max(1, steps * 10 // 11)  # as if the time of the first job were up before the model was done
    (ranks, devices), (other_ranks, other_devices) = _machines()

    print(heading(f"1 of 2: train on {_processes(ranks)} and stop at step {stop_at}"), flush=True)
    first = [*devices, *arguments, "--out", str(out), "--stop-at", str(stop_at), "--no-report"]
    if status := launch(SCRIPT, first, ranks):
        return status
    print(heading(f"2 of 2: resume on {_processes(other_ranks)} and finish"), flush=True)
    if status := launch(SCRIPT, ["--resume", str(out), "--out", str(out), *other_devices], other_ranks):
        return status
    from gpt.outlook import beside  # after the runs: it needs all of fsdp2, which only their processes did

    print(beside(out), flush=True)
    print(f"all of it: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def _machines() -> list[tuple[int, list[str]]]:
    """How many processes each of the two runs gets, and the options that say on what devices."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [(2, []), (3, [])]
    if gpus == 1:
        return [(1, []), (2, ["--device", "cpu"])]  # a checkpoint saved from a GPU goes on anywhere
    return [(2, []), (1 if gpus == 2 else 3, [])]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
