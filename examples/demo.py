"""Run the whole demo: train on some processes, save a checkpoint, and resume it on a different number of processes.

At the end it compares a recording of the last step with its forecast.

python examples/demo.py                    # or: make demo
python examples/demo.py --text FILE        # any option of train_gpt.py; only the first of the two runs gets it
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
OURS = ("--ranks", "--resume", "--stop-at")  # options that this program sets itself


def main(arguments: list[str]) -> int:
    """Return the exit status: 0, that of the first run that failed, or 2 after printing what was wrong in one line."""
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
    stop_at = max(1, steps * 10 // 11)  # as if the first job ran out of time before the model was trained
    (ranks, devices), (other_ranks, other_devices) = _machines()

    print(heading(f"1 of 2: train on {_processes(ranks)} and stop at step {stop_at}"), flush=True)
    first = [*devices, *arguments, "--out", str(out), "--stop-at", str(stop_at), "--no-report"]
    if status := launch(SCRIPT, first, ranks):
        return status
    print(heading(f"2 of 2: resume on {_processes(other_ranks)} and finish"), flush=True)
    if status := launch(SCRIPT, ["--resume", str(out), "--out", str(out), *other_devices], other_ranks):
        return status
    from gpt.outlook import beside  # here, because only this line needs all of fsdp2 in this process

    print(beside(out), flush=True)
    print(f"all of it: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def _machines() -> list[tuple[int, list[str]]]:
    """Return the number of processes of each of the two runs, and the options that choose their devices."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [(2, []), (3, [])]
    if gpus == 1:
        return [(1, []), (2, ["--device", "cpu"])]  # a checkpoint saved from a GPU can be resumed anywhere
    return [(2, []), (1 if gpus == 2 else 3, [])]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
