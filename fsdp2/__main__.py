"""``python -m fsdp2 script.py args`` runs a program with fsdp2's ``fully_shard`` in place of torch's."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence

import fsdp2

__all__ = ["main"]

_USAGE = """\
python -m fsdp2 script.py [argument ...]
       python -m fsdp2 -m module [argument ...]
       python -m fsdp2 forecast module:function --mesh shard=64
       python -m fsdp2 check"""
_DESCRIPTION = """\
Run a Python program with fsdp2's fully_shard in place of torch's, as if the program called fsdp2.install() first. You
need not change the program: accelerate, TRL, torchtitan and similar libraries then import fsdp2's function."""
_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp2 train.py --steps 100
  torchrun --nproc-per-node 8 -m fsdp2 -m torchtitan.train --job.config_file debug.toml
  accelerate launch --use_fsdp --fsdp_version 2 -m fsdp2 train.py

Processes that the program starts itself (torch.multiprocessing) still use torch's function, unless they call
fsdp2.install()."""


def _forecast(arguments: Sequence[str]) -> int:
    from fsdp2.tools.forecast.command import main  # here: it imports parts of torch that other programs do not need

    return main(arguments)


def _check(arguments: Sequence[str]) -> int:
    from fsdp2.tools.check.command import main  # likewise

    return main(arguments)


# Each takes the arguments after its name and returns the exit status.
_SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"forecast": _forecast, "check": _check}


def main(arguments: Sequence[str]) -> int:
    """Run the program or subcommand in ``arguments``; return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m fsdp2",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a script, a folder with a __main__.py, or a module")
    parser.add_argument("rest", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="an argument of the program")
    given = parser.parse_args(arguments)
    if not given.module and given.program in _SUBCOMMANDS:
        return _SUBCOMMANDS[given.program](given.rest)
    if not given.module and not os.path.exists(given.program):
        parser.error(f"can't open file {given.program!r}: no such file; -m runs a module")
    _run(given.program, given.rest, module=given.module)
    return 0


def _run(program: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run ``program`` with ``sys.argv`` and ``sys.path`` as Python would set them for it."""
    fsdp2.install(rebind=True)
    sys.argv[:] = [program, *arguments]
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        # Like Python itself: the first entry is the script's folder. ``-m fsdp2`` had put the current folder there.
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
