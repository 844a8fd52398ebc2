"""Train a byte-level GPT with fsdp2.fully_shard on several processes: CPU with gloo, or GPUs with NCCL.

    python examples/train_gpt.py                                   # starts two processes itself
    torchrun --nproc-per-node 2 examples/train_gpt.py              # the same under torchrun
    python examples/train_gpt.py --ranks 3 --resume runs/... --steps 600     # resumes on three processes

Only `build` in gpt/train.py uses fully_shard, in a dozen lines; the model in gpt/model.py is plain PyTorch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported: the profiler would announce itself

from gpt.options import parse
from gpt.processes import UserError, complain, launch, require, run_rank, started_by_torchrun


def main(arguments: list[str]) -> int:
    """Return the exit status: 0, or 2 after printing one line on stderr that says what was wrong with the input."""
    try:
        require("fsdp2", "matplotlib", "tqdm")
        if started_by_torchrun():
            from gpt.train import train  # not needed by the process that only starts the ranks

            run_rank("train_gpt.py", lambda: parse(arguments), train)
        options = parse(arguments)
        if options.resume is None:
            options.settings(None).check(options.ranks)  # before the processes are started
        return launch(Path(__file__).resolve(), arguments, options.ranks)
    except UserError as error:
        return complain(error, "train_gpt.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
