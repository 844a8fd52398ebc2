"""``python -m fsdp2 script.py args`` runs a program with fsdp2's ``fully_shard`` in place of torch's."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pkgutil import get_importer

import torch.distributed as dist

import fsdp2
from fsdp2.engine.unit import units_so_far

__all__ = ["main"]

_USAGE = """\
python -m fsdp2 script.py [argument ...]
       python -m fsdp2 -m module [argument ...]
       python -m fsdp2 forecast module:function --mesh shard=64
       python -m fsdp2 check"""
_DESCRIPTION = """\
Run a Python program with fsdp2's fully_shard in place of torch's, as if the program called
fsdp2.install() first. You need not change the program: accelerate, TRL, torchtitan and similar
libraries then import fsdp2's function."""
_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp2 train.py --steps 100
  torchrun --nproc-per-node 8 -m fsdp2 -m torchtitan.train --job.config_file debug.toml
  accelerate launch --use_fsdp --fsdp_version 2 -m fsdp2 train.py

At the program's end, a line on stderr says how many units of fsdp2 ran, or that there was none.
Processes that the program starts itself (torch.multiprocessing) still use torch's function,
unless they call fsdp2.install()."""
_UNUSED = """\
fsdp2 did nothing: this process never called fully_shard. To let a library call it, set:
  accelerate launch          --use_fsdp --fsdp_version 2, before -m fsdp2
  transformers, TRL          TrainingArguments(fsdp=True, fsdp_config={"version": 2, ...})
  Lightning                  a ModelParallelStrategy, and a configure_model that calls fully_shard
accelerate, and so transformers and TRL, shard on GPUs only: on CPUs they train with DDP. Processes
that a program starts itself must call fsdp2.install() themselves."""


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
    # What follows the program is not parsed: argparse would take a "--" away.
    before = len(list(takewhile(lambda one: one.startswith("-") and one != "--", arguments)))
    before += arguments[before : before + 1] == ["--"]
    given = parser.parse_args(arguments[: before + 1])
    rest = arguments[before + 1 :]
    if not given.module and given.program in _SUBCOMMANDS:
        return _SUBCOMMANDS[given.program](rest)
    if not given.module and not os.path.exists(given.program):
        commands = " and ".join(_SUBCOMMANDS)
        parser.error(f"{given.program!r}: no such file or command; the commands are {commands}, and -m runs a module")
    if given.module and importlib.util.find_spec(given.program.partition(".")[0]) is None:
        parser.error(f"No module named {given.program!r}; it is searched for in the current folder and in sys.path")
    _run(given.program, rest, module=given.module)
    return 0


def _run(program: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run ``program`` with ``sys.argv`` and ``sys.path`` as Python would set them for it."""
    fsdp2.install(rebind=True)
    sys.argv[:] = [program, *arguments]
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _search_as_for(program)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as exit:
        _say_what_ran(failed=exit.code not in (None, 0))
        raise
    _say_what_ran()


def _search_as_for(program: str) -> None:
    """Put the folder of a script first in ``sys.path``, in place of the current folder, which ``-m fsdp2`` put there.

    As Python does it: that of the file which a link points to; and with ``-P`` neither folder is there. A folder or
    an archive is put there by ``runpy``.
    """
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[:1] = [os.path.dirname(os.path.realpath(program))] if get_importer(program) is None else []


def _say_what_ran(*, failed: bool = False) -> None:
    """Print on the first rank of each host how many units of fsdp2 ran, and what to set if there was none."""
    if dist.get_node_local_rank(fallback_rank=0):
        return
    made, ran = units_so_far()
    text = f"{ran} unit{'s' * (ran != 1)} of fsdp2 ran"
    if made > ran:
        text += f", of {made} that were made"
    if not made:
        if failed:  # it may have ended before
            return
        text = _UNUSED
    print(f"python -m fsdp2: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
