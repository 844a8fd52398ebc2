"""The command line of ``python -m fsdp2 forecast``."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdp2.tools.forecast.comparing import Case, compare, comparison
from fsdp2.tools.forecast.cost import DEVICES, Hardware, Link

__all__ = ["main"]

_DESCRIPTION = """\
Forecast the memory, collectives and time of a training step on one rank of a cluster. Your own code builds the model
and runs a step. Tensors take no memory and collectives send nothing, so you need no GPU and no weights.

MODULE:FUNCTION is a function build(mesh) that calls fully_shard and returns the model, or (model, optimizer). The same
module has a function step(model, optimizer) that runs a training step. Memory and collectives are those of a real run;
times are estimates of a cost model, whose constants are printed below the table."""
_EXAMPLES = """\
examples:
  python -m fsdp2 forecast train:build --mesh replicate=4,shard=16
  python -m fsdp2 forecast train:build --mesh shard=64 --beside torch
  python -m fsdp2 forecast train:build --mesh shard=64 --save step.html step.png
  python -m fsdp2 forecast train:build --mesh shard=64 --mesh dp=8,tp=8 --fit 80GiB
  python -m fsdp2 forecast train:build --mesh shard=64 --compare checkpointing=True,False layers=32,48

The last one calls build(mesh, checkpointing=True, layers=32) and so on. With --fit the exit status is 1 if nothing
fits."""


def main(arguments: Sequence[str]) -> int:
    """Print the forecast for ``arguments``; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        hardware = _hardware(given)
        build, step = _function(given.build), _function(f"{given.build.partition(':')[0]}:{given.step}")
        settings = dict(map(_setting, given.compare))
        options = {"hardware": hardware, "backend": given.backend, "steps": given.steps, "beside": given.beside}
        with _Progress() as progress:
            cases = compare(build, step, given.mesh, settings, progress=progress, **options)
    except ValueError as error:
        parser.error(str(error))
    return _show(cases, given, hardware)


def _show(cases: list[Case], given: argparse.Namespace, hardware: Hardware) -> int:
    """Print and save the results of the cases; return the exit status."""
    results = [case.forecast for case in cases if case.forecast is not None]
    if len(cases) == 1 and not results:
        print(f"python -m fsdp2 forecast: error: {cases[0].error}", file=sys.stderr)
        return 2
    if given.json:
        texts = [result.to_json() for result in results]
        print(texts[0] if len(cases) == 1 else f"[{', '.join(texts)}]")
    else:
        if len(cases) == 1:
            print(f"{results[0]}\n")
        if len(cases) > 1 or given.fit is not None:
            print(f"{comparison(cases, given.fit)}\n")
        print(hardware)
    for path in given.save if results else []:
        results[0].save(path, *(timeline for result in results[1:] for timeline in result.timelines))
        print(f"saved {path}", file=sys.stderr)
    return int(given.fit is not None and not any(case.fits(given.fit) for case in cases))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 forecast",
        usage="python -m fsdp2 forecast MODULE:FUNCTION --mesh NAME=SIZE,... [option ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=112),
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
    add("--steps", type=int, default=3, metavar="N", help="run N steps and measure the last one (3)")
    add("--backend", default="nccl", choices=("nccl", "gloo"), help="gloo: CPUs, without streams")
    add("--device", choices=sorted(DEVICES), help="the constants of the cost model (h100)")
    add(
        "--hardware",
        metavar="FILE",
        help="the constants of the cost model from a JSON file, as Hardware.save writes it",
    )
    add("--nodes-of", type=int, metavar="N", help="ranks in a node (8)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="replace single constants of the cost model")
    add(
        "--link",
        nargs="+",
        default=[],
        metavar="RANKS=S,B/S",
        help="latency and bandwidth of a collective over RANKS ranks: 64=3e-4,3e11",
    )
    add("--compare", nargs="+", default=[], metavar="NAME=A,B", help="call build with NAME=A, with NAME=B, and so on")
    add(
        "--beside",
        choices=("torch",),
        help="also run the functions with torch's own fully_shard, and show both side by side",
    )
    add("--fit", type=_bytes, metavar="SIZE", help="mark settings that fit into SIZE, such as 80GiB; name the fastest")
    add("--save", nargs="+", default=[], metavar="FILE", help="pictures: .html, .png, .svg, .pdf; .json for Perfetto")
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


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: expected NAME=SIZE with a size of at least 1, as in shard=16")
        sizes[name] = int(size)
    return sizes


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([\d.]+) ?([KMGT]i?B|B)?", text)
    units = {
        f"{letter}{i}B": base**power for power, letter in enumerate("KMGT", 1) for i, base in (("i", 1024), ("", 1000))
    }
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 80GiB")
    return int(float(found[1]) * units.get(found[2] or "", 1))


def _setting(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name.isidentifier() or not values:
        raise ValueError(f"--compare {text}: expected NAME=A,B with an argument of build")
    return name, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _hardware(given: argparse.Namespace) -> Hardware:
    try:
        device = DEVICES[given.device or "h100"] if given.hardware is None else Hardware.load(given.hardware)
    except OSError as error:
        raise ValueError(f"--hardware {given.hardware}: {error.strerror}") from error
    if given.hardware is not None and given.device is not None:
        raise ValueError("--device and --hardware: both name the machine; expected one of them")
    numbers = {field.name: type(getattr(device, field.name)) for field in fields(Hardware) if field.name != "links"}
    values: dict[str, Any] = {} if given.nodes_of is None else {"ranks_per_node": given.nodes_of}
    for change in given.set:
        name, _, value = change.partition("=")
        if name not in numbers:
            raise ValueError(f"--set {change}: there is no constant {name!r}; expected one of {sorted(numbers)}")
        values[name] = numbers[name](float(value)) if numbers[name] is not str else value
    links = {link.ranks: link for link in device.links} | dict(map(_link, given.link))
    return replace(device, **values, links=tuple(links[ranks] for ranks in sorted(links)))


def _link(text: str) -> tuple[int, Link]:
    found = re.fullmatch(r"(\d+)=([-+.\deE]+),([-+.\deE]+)", text)
    if found is None:
        raise ValueError(f"--link {text}: expected RANKS=SECONDS,BYTES_PER_SECOND, such as 64=3e-4,3e11")
    return int(found[1]), Link(int(found[1]), float(found[2]), float(found[3]))


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: {error}; expected a module that can be imported from {os.getcwd()}") from error
    except Exception as error:
        raise ValueError(
            f"{name}: importing {module} raised {type(error).__name__}: {error}. A forecast imports the module and "
            'calls its functions; put the rest of a script under if __name__ == "__main__"'
        ) from error
    if not callable(found):
        raise ValueError(f"{name}: the module has no function {attribute!r}; expected MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]
