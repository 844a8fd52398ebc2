"""What a training step needs: ``python -m fsdp2 forecast MODULE:FUNCTION --mesh replicate=4,shard=16``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdp2.forecasting.cost import H100, Hardware
from fsdp2.forecasting.run import forecast

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Print the forecast that ``arguments`` ask for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2 forecast", description=__doc__)
    parser.add_argument("build", metavar="MODULE:FUNCTION", help="returns model, or (model, optimizer), for a mesh")
    parser.add_argument("--step", metavar="FUNCTION", default="step", help="of the same module: step(model, optimizer)")
    parser.add_argument(
        "--mesh", required=True, type=_mesh, metavar="NAME=SIZE,...", help="such as replicate=4,shard=16"
    )
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"), help="gloo: as on CPUs, without streams")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the cost model")
    parser.add_argument("--json", action="store_true", help="for another program")
    given = parser.parse_args(arguments)
    try:
        hardware = _hardware(given.set)
        build, step = _function(given.build), _function(f"{given.build.partition(':')[0]}:{given.step}")
    except ValueError as error:
        parser.error(str(error))
    result = forecast(build, step, mesh=given.mesh, hardware=hardware, backend=given.backend)
    print(result.to_json() if given.json else f"{result}\n\n{hardware}")
    return 0


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: expected NAME=SIZE with a size of at least 1, as in shard=16")
        sizes[name] = int(size)
    return sizes


def _hardware(changes: Sequence[str]) -> Hardware:
    numbers = {field.name: type(getattr(H100, field.name)) for field in fields(Hardware) if field.name != "links"}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in numbers:
            raise ValueError(f"--set {change}: there is no constant {name!r}; expected one of {sorted(numbers)}")
        values[name] = numbers[name](float(value)) if numbers[name] is not str else value
    return replace(H100, **values)


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: {error}; expected a module that can be imported from {os.getcwd()}") from error
    if not callable(found):
        raise ValueError(f"{name}: the module has no function {attribute!r}; expected MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]
