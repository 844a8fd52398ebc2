"""How entangled the package is: what changes during a training step, who decides by states, and who calls whom.

The step is one forward and backward of three units on two pretended ranks, after the steps in which they learn their
order. ``--detail`` lists what is counted.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _common import Row, arguments, fake_sides, finish, shard_units
from torch import nn

import fsdp2

PACKAGE = Path(fsdp2.__file__).parent
UNITS, WIDTH = 3, 8
CORE = ("engine", "comm", "sharding", "autograd", "fully_shard.py", "module.py")


def sources() -> dict[str, ast.Module]:
    """Every file of the package, parsed, by its path in it."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def state_reads(trees: dict[str, ast.Module]) -> list[str]:
    """Where a group's phase or residency is read to choose what to do; faces of other libraries only show them."""
    found = []
    for path, tree in trees.items():
        if path == "engine/lifecycle.py" or path.startswith("compat/"):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name != "__repr__":
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and node.attr in ("phase", "residency"):
                        found.append(f"{path}:{node.lineno}")
    return list(dict.fromkeys(found))


def importers_of_private_torch(trees: dict[str, ast.Module]) -> list[str]:
    """The files outside of it that import from ``fsdp2._torch``."""
    return [
        path
        for path, tree in trees.items()
        if not path.startswith("_torch")
        and any(isinstance(n, ast.ImportFrom) and (n.module or "").startswith("fsdp2._torch") for n in ast.walk(tree))
    ]


def own_calls(step: Callable[[], object]) -> Counter[tuple[str, str]]:
    """(Caller's file, called function) of every call of a function of the package, made by any of them, in one step."""
    calls: Counter[tuple[str, str]] = Counter()
    root = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(root):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        where = "torch" if caller is None else caller.f_code.co_filename.removeprefix(root)
        calls[where, f"{called.removeprefix(root)}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def changing_fields(step: Callable[[], object]) -> list[str]:
    """The attributes of the package's objects that a step assigns, or changes inside, after they were made."""
    found: set[str] = set()
    root, before = f"{PACKAGE}/", {}

    def content(owner: Any) -> dict[str, Any]:
        names = getattr(owner, "__dict__", None)
        if names is None:
            names = {name: getattr(owner, name) for name in type(owner).__slots__ if hasattr(owner, name)}
        return {name: tuple(value) if isinstance(value, (list, set, dict)) else value for name, value in names.items()}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(root):
            return
        owner = frame.f_locals.get("self")
        if owner is None or isinstance(owner, nn.Module) or not type(owner).__module__.startswith("fsdp2"):
            return
        now = content(owner)
        old = before.get(id(owner), (None, {}))[1]
        if frame.f_code.co_name != "__init__" and id(owner) in before:
            changed = (n for n, v in now.items() if n not in old or not same(old[n], v))
            found.update(f"{type(owner).__name__}.{name}" for name in changed)
        before[id(owner)] = owner, now

    sys.setprofile(note)
    try:
        step()
        step()  # what the first left behind, the second finds changed
    finally:
        sys.setprofile(None)
    return sorted(found)


def same(old: Any, new: Any) -> bool:
    """Whether an attribute is what it was; containers by what is in them."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(a is b for a, b in zip(old, new))
    return old is new or (isinstance(old, (int, float, str)) and type(old) is type(new) and old == new)


def make_step(fully_shard: Any, mesh: Any) -> Callable[[], object]:
    """One training step of three units, warm."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(UNITS)))
    shard_units(model, model.children(), fully_shard, mesh, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(2, WIDTH)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def details(title: str, entries: Iterator[str] | list[str]) -> None:
    """Print what a figure counts."""
    print(f"\n{title}", *entries, sep="\n  ")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--detail", action="store_true", help="list what is counted")
    options = parser.parse_args()
    sides, mesh = fake_sides(options, 2)
    step, trees = make_step(sides["ours"], mesh), sources()
    fields, calls = changing_fields(step), own_calls(step)
    across = {edge: n for edge, n in calls.items() if edge[0] != edge[1].split(":")[0]}
    reads, importers = state_reads(trees), importers_of_private_torch(trees)
    lines = {path: len((PACKAGE / path).read_text().splitlines()) for path in trees}
    if options.detail:
        details("fields", fields)
        details("reads", reads)
        details("calls", [f"{n:4} {a} -> {b}" for (a, b), n in Counter(across).most_common()])
        details("importers", importers)
    rows = [
        Row("fields that change in one step", len(fields), limit=30, relative=False),
        Row("reads of phase or residency that choose what to do", len(reads), limit=8, relative=False),
        Row("calls into another file in a step of three units", sum(across.values()), limit=330, relative=False),
        Row("calls of the package's functions in that step", sum(calls.values())),
        Row("files that import private names of torch", len(importers), limit=25, relative=False),
        Row("lines", sum(lines.values()), limit=12300, relative=False),
        Row("lines of " + ", ".join(CORE), sum(n for path, n in lines.items() if path.startswith(CORE))),
    ]
    finish("structure", rows, __doc__ or "", options)


if __name__ == "__main__":
    main()
