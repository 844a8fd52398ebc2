"""The command line of ``python -m fsdp2 forecast``."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp2.tools.forecast.comparing import Case, compare, comparison
from fsdp2.tools.forecast.cost import DEVICES, H100, Hardware, Link
from fsdp2.tools.forecast.rank import line_of, users_traceback
from fsdp2.tools.forecast.saving import file_for

__all__ = ["main"]

_DESCRIPTION = """\
Forecast the memory, collectives and time of a training step on one rank of a cluster. Your own
code builds the model and runs a step. Tensors take no memory and collectives send nothing, so you
need no GPU and no weights.

MODULE:FUNCTION is a function build(mesh) that calls fully_shard and returns the model, or (model,
optimizer). The same module has a function step(model, optimizer) that runs a training step.
Memory and collectives are those of a real run; times are estimates of a cost model, whose
constants are printed below the table."""
_EXAMPLES = """\
examples:
  python -m fsdp2 forecast train:build --mesh replicate=4,shard=16
  python -m fsdp2 forecast train:build --mesh shard=64 --beside torch
  python -m fsdp2 forecast train:build --mesh shard=64 --save step.html step.png
  python -m fsdp2 forecast train:build --mesh shard=64 --mesh dp=8,tp=8 --fit 80GiB
  python -m fsdp2 forecast train:build --mesh shard=64 --compare checkpointing=True,False \\
    layers=32,48

The last one calls build(mesh, checkpointing=True, layers=32) and so on. With --fit the exit
status is 1 if nothing fits."""


def main(arguments: Sequence[str]) -> int:
    """Print the forecast for ``arguments``; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        hardware = _hardware(given)
        settings = _unique("--compare", given.compare)
        options = {"hardware": hardware, "backend": given.backend, "steps": given.steps, "beside": given.beside}
        # What the user's code prints is no part of the JSON.
        with redirect_stdout(sys.stderr) if given.json else nullcontext(), _Progress() as progress:
            build, step = _functions(given.build, given.step)
            cases = compare(build, step, given.mesh, settings, progress=progress, **options)
    except ValueError as error:
        parser.error(str(error))
    except _Imported as error:
        return _failed(error.__cause__ or error, str(error))
    return _show(cases, given, hardware)


def _show(cases: list[Case], given: argparse.Namespace, hardware: Hardware) -> int:
    """Print and save the results of the cases; return the exit status."""
    results = [case.forecast for case in cases if case.forecast is not None]
    if len(cases) == 1 and cases[0].raised is not None:
        return _failed(cases[0].raised, cases[0].error)
    if given.json:
        figures = [case.to_json() for case in cases]
        print(results[0].to_json() if len(cases) == 1 else json.dumps(figures, indent=2))
    else:
        if len(cases) == 1:
            print(f"{results[0]}\n")
        if len(cases) > 1 or given.fit is not None:
            print(f"{comparison(cases, given.fit)}\n")
        print(f"constants of the cost model:\n{hardware}")
    for path in given.save if results else []:
        results[0].save(path, *(timeline for result in results[1:] for timeline in result.timelines))
        print(f"saved {path}", file=sys.stderr)
    if not results:
        return 2
    return int(given.fit is not None and not any(case.fits(given.fit) for case in cases))


def _failed(error: BaseException, text: str) -> int:
    """Print the user's part of the traceback, if there is one, and the text; return the exit status."""
    print(f"{users_traceback(error)}python -m fsdp2 forecast: error: {text}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 forecast",
        usage="python -m fsdp2 forecast MODULE:FUNCTION --mesh NAME=SIZE,... [option ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=100),
    )
    add = parser.add_argument
    add("build", metavar="MODULE:FUNCTION", help="the function that builds the model on a mesh")
    add("--step", metavar="FUNCTION", default="step", help="the function that runs a step, in the same module (step)")
    add(
        "--mesh",
        required=True,
        action="append",
        type=_mesh,
        metavar="NAME=SIZE,...",
        help="ranks along each dimension, such as replicate=4,shard=16; several times to compare",
    )
    add("--steps", type=_count, default=3, metavar="N", help="run N steps and measure the last one (3)")
    add("--backend", default="nccl", choices=("nccl", "gloo"), help="gloo: CPUs, without streams")
    add("--device", choices=sorted(DEVICES), help="the constants of the cost model (h100)")
    add(
        "--hardware",
        type=_loaded,
        metavar="FILE",
        help="the constants of the cost model from a JSON file, as Hardware.save writes it",
    )
    add("--nodes-of", type=_count, metavar="N", help="ranks in a node (8)")

    def several(name: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        """Add an option with several values, which may also be given several times."""
        add(name, nargs="+", action="extend", default=[], type=kind, metavar=metavar, help=text)

    several("--set", _constant, "NAME=VALUE", "replace single constants of the cost model")
    several("--link", _link, "RANKS=S,B/S", "latency and bandwidth of a collective over RANKS ranks: 64=3e-4,3e11")
    several("--compare", _setting, "NAME=A,B", "call build with NAME=A, with NAME=B, and so on")
    add(
        "--beside",
        choices=("torch",),
        help="also run the functions with torch's own fully_shard, and show both side by side",
    )
    add("--fit", type=_bytes, metavar="SIZE", help="mark settings that fit into SIZE, such as 80GiB; name the fastest")
    several("--save", _target, "FILE", "pictures: .html, .png, .svg, .pdf; .json for Perfetto")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    return parser


class _Progress:
    """Shows the progress: on one line of a terminal that is overwritten, or as a line of a log for each stage."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown, self._stage = 0.0, ""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, doing: str) -> None:
        if self._terminal:
            if time.monotonic() - self._shown > 0.1:
                self._shown = time.monotonic()
                print(f"\r\x1b[K{doing[:110]}", end="", file=sys.stderr, flush=True)
            return
        stage = re.sub(r"(building|step \d+ of \d+).*", r"\1", doing)
        if stage != self._stage:
            self._stage = stage
            print(stage, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not re.fullmatch(r"\d+", size) or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: expected NAME=SIZE with a size of at least 1, as in shard=16")
        if name in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} names {name!r} twice; expected each dimension once")
        sizes[name] = int(size)
    return sizes


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+|\d*\.\d+) ?([KMGT]i?B|B)?", text)
    units = {
        f"{letter}{i}B": base**power for power, letter in enumerate("KMGT", 1) for i, base in (("i", 1024), ("", 1000))
    }
    size = 0 if found is None else int(float(found[1]) * units.get(found[2] or "", 1))
    if size < 1024:  # a number alone was probably meant in GiB
        got = f"{text!r} is {size} B" if found is not None else repr(text)
        raise argparse.ArgumentTypeError(f"{got}; expected a size such as 80GiB")
    return size


def _target(text: str) -> Path:
    try:
        return file_for(text)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _setting(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name.isidentifier() or not values:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=A,B with an argument of build")
    return name, [_value(value) for value in _split(values)]


def _split(text: str) -> list[str]:
    """Return the parts between commas, except those inside brackets or quotes."""
    parts, closing = [""], list[str]()
    for letter in text:
        if letter == "," and not closing:
            parts.append("")
            continue
        parts[-1] += letter
        if closing and letter == closing[-1]:
            closing.pop()
        elif letter in _CLOSING and not (closing and closing[-1] in "\"'"):
            closing.append(_CLOSING[letter])
    return parts


_CLOSING = {"(": ")", "[": "]", "{": "}", '"': '"', "'": "'"}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if not text or text[0] in _CLOSING:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a word, or a value as in Python, such as 32, (1,2) or 'a,b'"
        )
    if text.lower() in ("true", "false", "none"):  # as a word, each would count as true
        raise argparse.ArgumentTypeError(f"{text!r}: expected True, False or None")
    return text


def _loaded(text: str) -> Hardware:
    try:
        return Hardware.load(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_CONSTANTS = {field.name: type(getattr(H100, field.name)) for field in fields(Hardware) if field.name != "links"}


def _constant(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in _CONSTANTS:
        raise argparse.ArgumentTypeError(
            f"{text}: there is no constant {name!r}; expected one of {', '.join(sorted(_CONSTANTS))}"
        )
    try:
        found = _CONSTANTS[name](value)
        replace(H100, **{name: found})  # which checks it
    except ValueError as error:
        kind = {int: "a whole number", float: "a number"}.get(_CONSTANTS[name], "a text")
        raise argparse.ArgumentTypeError(f"{text}: expected {kind} above 0") from error
    return name, found


def _link(text: str) -> tuple[int, Link]:
    try:
        ranks, _, rest = text.partition("=")
        seconds, _, speed = rest.partition(",")
        return int(ranks), Link(int(ranks), float(seconds), float(speed))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: expected RANKS=SECONDS,BYTES_PER_SECOND, numbers above 0, such as 64=3e-4,3e11"
        ) from error


def _unique(option: str, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the values of an option by their names.

    Raises:
        ValueError: Two of them have one name.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{option}: {twice} is given {names.count(twice)} times; expected it once")
    return found


def _hardware(given: argparse.Namespace) -> Hardware:
    if given.hardware is not None and given.device is not None:
        raise ValueError("--device and --hardware: both name the machine; expected one of them")
    device = DEVICES[given.device or "h100"] if given.hardware is None else given.hardware
    nodes = [] if given.nodes_of is None else [("ranks_per_node", given.nodes_of)]
    values = _unique("--set and --nodes-of", [*nodes, *given.set])
    links = {link.ranks: link for link in device.links} | _unique("--link", given.link)
    return replace(device, **values, links=tuple(links.values()))


class _Imported(Exception):
    """The user's module raised an exception, its cause, when it was imported."""


def _functions(build: str, step: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the user's two functions.

    Raises:
        ValueError: The name is no MODULE:FUNCTION, or there is no such module or function.
        _Imported: Importing the module raised an exception.
    """
    name, _, function = build.partition(":")
    if name.endswith(".py") or "/" in name or "\\" in name:
        name = ".".join(Path(name).with_suffix("").parts)
        raise ValueError(
            f"{build}: this is a file; expected a module, as Python imports it: {name}:{function or 'build'}"
        )
    if not name or not function.isidentifier():
        raise ValueError(f"{build}: expected MODULE:FUNCTION, such as {name or 'train'}:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"{build}: {error}; expected a module that can be imported from {os.getcwd()}") from error
        what = f"{type(error).__name__}: {error}"
        line = line_of(error)
        raise _Imported(
            f"{build}: importing {name} raised {what}{line and f', in {line}'}. A forecast imports the module and "
            'calls its functions; put the rest of a script under if __name__ == "__main__"'
        ) from error
    return _function(module, function), _function(module, step)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        where = getattr(module, "__file__", None) or "it is built into Python"
        raise ValueError(f"{module.__name__}:{name}: the module ({where}) has no function {name!r}")
    return found  # type: ignore[no-any-return]  # a module's attribute
