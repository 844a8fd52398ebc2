"""The house rules as functions from parsed source to a list of complaints, one line each.

A ``Source`` is a path inside the repository and its text; so the rules can be tried on snippets. What a name refers to
is decided by the imports of the file it stands in, which is enough because nothing here rebinds a module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef

COLLECTIVES = re.compile(
    r"_?(all_?gather|all_?reduce|reduce_scatter|all_?to_?all|broadcast|scatter|gather|reduce|i?send|i?recv|barrier|"
    r"monitored_barrier|batch_isend_irecv|coalescing_manager|start_coalescing|end_coalescing)"
    r"(_(base|single|tensor|into|object|objects|coalesced|list))*_?"
)
GROUP_METHODS = {
    name
    for stem in ("allgather", "allreduce", "alltoall", "reduce_scatter")
    for name in (stem, f"{stem}_base", f"_{stem}_base", f"{stem}_coalesced", f"{stem}_tensor_coalesced")
} | {"allgather_into_tensor_coalesced", "_start_coalescing", "_end_coalescing"}
"""What process groups call their collectives."""
STREAMS = {
    "Stream",
    "Event",
    "ExternalStream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "wait_stream",
    "wait_event",
    "record_stream",
    "record_event",
}
HOOK = re.compile(r"register_\w*hook")
OF_A_TYPE = re.compile(r"type\((.+)\)\.__name__")
MODULE = re.compile(r"^(module|model|top|root)$|^(modules|roots)\[|\.module\b|\.modules\[")
"""What holds a module, by its name."""
AGREED = {"_parameters", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Private names that may stand anywhere: the dictionary of a module's parameters, which is read and written directly
because ``getattr`` and ``setattr`` cost too much, and what Dynamo reads on managed modules."""


@dataclass(frozen=True)
class Source:
    """A Python file."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node, those in annotations left out: they name types and do nothing."""
        return list(walk(self.tree))

    @property
    def component(self) -> str:
        """The entry of FOLDERS that the file is, or lies in."""
        return component_of(self.path.removesuffix(".py").replace("/", "."))

    @cached_property
    def bindings(self) -> dict[str, str]:
        """Full dotted names of what imports bind."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    found[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{self.base_of(node)}.{alias.name}"
        return found

    def base_of(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def dotted(self, node: ast.AST) -> str:
        """Return the full dotted name of a chain of attributes that starts at an import, or ""."""
        if isinstance(node, ast.Name):
            return self.bindings.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def imported(self) -> Iterator[tuple[int, str]]:
        """Yield line and full dotted name of everything imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{self.base_of(node)}.{alias.name}") for alias in node.names)

    def at(self, node: ast.AST | int, what: str) -> str:
        """Return a complaint."""
        return f"{self.path}:{node if isinstance(node, int) else getattr(node, 'lineno', 0)}: {what}"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and all below it except annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def functions(source: Source) -> Iterator[Function]:
    """Yield every function of a file."""
    yield from (node for node in source.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


FOLDERS = (
    "__main__",
    "forecasting",
    "tools.check",
    "tools",
    "__init__",
    "tools.forecast",
    "fsdp1.install",
    "forward_methods",
    "fully_shard",
    "hints",
    "fsdp1",
    "grouping",
    "module",
    "compression",
    "weights",
    "optim",
    "ranks",
    "engine",
    "autograd",
    "comm",
    "sharding",
    "policies",
    "_trace",
    "_naming",
    "_warn",
    "_torch",
)
"""The folders and files of the package from the top down; each imports from those behind it only. A part of a folder
that stands higher than the rest of it is an entry of its own."""
UNORDERED = {"fsdp2", "fsdp2/_torch", "fsdp2/forecasting"}
"""Folders that list no order: the package, whose order is FOLDERS, and subjects side by side."""


def component_of(name: str) -> str:
    """Return the longest entry of FOLDERS that the dotted ``name`` is or lies in, or the name below the package."""
    below = name.split(".")[1:] or ["__init__"]
    for length in (2, 1):
        if (entry := ".".join(below[:length])) in FOLDERS:
            return entry
    return below[0]


def import_direction(source: Source) -> list[str]:
    """Folders import from those that come later in FOLDERS only, types included."""
    if source.component not in FOLDERS:
        return [source.at(1, f"{source.component} has no place in FOLDERS")]
    found = []
    for line, name in source.imported():
        if name.split(".")[0] != "fsdp2":
            continue
        target = component_of(name)
        if target not in FOLDERS:
            found.append(source.at(line, f"{target} has no place in FOLDERS"))
        elif source.component != target and FOLDERS.index(target) < FOLDERS.index(source.component):
            found.append(source.at(line, f"{source.component} must not import {target}"))
    return found


def imported_files(source: Source, files: Iterable[str]) -> dict[str, int]:
    """Return the files of the package that a file imports from, each with a line where it does."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    found: dict[str, int] = {}
    for line, name in source.imported():
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and modules[name] != source.path:
            found.setdefault(modules[name], line)
    return found


def import_cycles(sources: Iterable[Source]) -> list[str]:
    """Return the imports that lead from a file back to itself, those of types included."""
    by_path = {source.path: source for source in sources}
    imports = {path: imported_files(source, by_path) for path, source in by_path.items()}

    def reaches(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(imports[start])
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += imports[path]
        return seen

    inside = {path: reaches(path) for path in imports}
    return [
        by_path[path].at(line, f"imports {other}, which leads back")
        for path in imports
        for other, line in imports[path].items()
        if path in inside[other]
    ]


def listed_order(source: Source) -> list[str]:
    """Return the files that a folder's ``__init__.py`` lists, one a line: its name, two spaces, what it is about."""
    text = ast.get_docstring(source.tree) or ""
    return [found.group(1) for line in text.splitlines() if (found := re.match(r"(\w+)/? {2,}\S", line))]


def folder_order(sources: Iterable[Source]) -> list[str]:
    """Each folder lists its files from the top down, and a file imports only from those listed behind it."""
    by_path = {source.path: source for source in sources}
    found = []
    for path, source in by_path.items():
        folder = path.removesuffix("/__init__.py")
        if folder == path or folder in UNORDERED:
            continue
        order = listed_order(source)
        inside = {p: p.removeprefix(f"{folder}/").split("/")[0].removesuffix(".py") for p in by_path}
        inside = {p: name for p, name in inside.items() if p.startswith(f"{folder}/") and name != "__init__"}
        found += [source.at(1, f"does not list {name}") for name in sorted(set(inside.values()) - set(order))]
        found += [source.at(1, f"lists {name}, which is not there") for name in order if name not in inside.values()]
        for p, name in inside.items():
            for other, line in imported_files(by_path[p], by_path).items():
                below = inside.get(other, name)
                places = {listed: place for place, listed in enumerate(order)}
                if below != name and places.get(below, -1) < places.get(name, 0):
                    found.append(by_path[p].at(line, f"{name} must not import {below}, which is listed before it"))
    return found


def collectives(source: Source) -> list[str]:
    """Collectives are called in comm/collectives.py only; _torch may give a private one its name."""
    if source.path == "fsdp2/comm/collectives.py" or source.component == "_torch":
        return []
    imported = [(line, name) for line, name in source.imported() if is_collective(name)]
    found = [source.at(line, f"imports the collective {name}") for line, name in imported]
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_collective(source.dotted(node)):
            found.append(source.at(node, f"uses the collective {node.attr}"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROUP_METHODS:
            found.append(source.at(node, f"calls the collective {node.func.attr}"))
    return found


def is_collective(name: str) -> bool:
    """Return whether a dotted name is a collective of torch."""
    if name == "fsdp2._torch.collectives.coalescing_manager" or name.startswith(("torch.ops.c10d", "torch.ops._c10d")):
        return True
    return name.startswith("torch.distributed.") and bool(COLLECTIVES.fullmatch(name.rsplit(".", 1)[1]))


def streams(source: Source) -> list[str]:
    """Stream primitives are used in comm/streams.py only; a forecast's own streams have their names, the check watches
    them and has a program with a stream of its own, and annotations may name their types."""
    tools = ("forecast/clock.py", "check/ordering.py", "check/on_streams.py")
    if source.path in ("fsdp2/comm/streams.py", *(f"fsdp2/tools/{tool}" for tool in tools)):
        return []
    found = [n for n in source.nodes if isinstance(n, ast.Attribute) and n.attr in STREAMS]
    complaints = [source.at(node, f"uses the stream primitive {node.attr}") for node in found]
    for line, name in source.imported():
        if name.startswith("torch.") and name.rsplit(".", 1)[1] in STREAMS:
            complaints.append(source.at(line, f"imports the stream primitive {name}"))
    return complaints


def is_private(name: str) -> bool:
    """Return whether a single name starts with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def own_private_names(sources: Iterable[Source]) -> set[str]:
    """Return the private names that the package itself defines: functions, classes, attributes of self and classes."""
    found = set(AGREED)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if is_private(name)}


def private_torch(source: Source, own: set[str]) -> list[str]:
    """Private names of torch, imported or reached as attributes, stand in _torch only."""
    if source.component == "_torch":
        return []
    found = []
    for line, name in source.imported():
        if name.split(".")[0] == "torch" and any(is_private(part) for part in name.split(".")):
            found.append(source.at(line, f"imports the private name {name}"))
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = source.dotted(node).split(".")[0]
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if root == "torch" or not (root or mine or node.attr in own):
                found.append(source.at(node, f"reaches for the private name {node.attr}"))
    return found


def grad_assignments(source: Source) -> list[str]:
    """``.grad`` is assigned in engine/param.py only."""
    if source.path == "fsdp2/engine/param.py":
        return []
    found = [
        source.at(node, "assigns .grad")
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "grad" and not isinstance(node.ctx, ast.Load)
    ]
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and node.args[1].value == "grad":
                found.append(source.at(node, "assigns .grad"))
    return found


def hook_registration(source: Source) -> list[str]:
    """Hooks are registered in autograd/hooks.py only."""
    if source.path == "fsdp2/autograd/hooks.py":
        return []
    names = [(n, n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "")) for n in source.nodes]
    return [source.at(node, f"uses {name}") for node, name in names if HOOK.fullmatch(name)]


def environment(source: Source) -> list[str]:
    """There are no options in environment variables."""
    wanted = ("os.environ", "os.getenv", "os.putenv")
    found = [node for node in source.nodes if source.dotted(node) in wanted]
    return [source.at(node, "reads the environment") for node in found]


def module_names(source: Source) -> list[str]:
    """Messages call a module by the class that its author wrote (``class_name``), not by the one of fully_shard."""
    found = []
    for node in source.nodes:
        named = OF_A_TYPE.fullmatch(ast.unparse(node)) if isinstance(node, ast.Attribute) else None
        if named is not None and MODULE.search(named[1]):
            found.append(source.at(node, f"names the class of {named[1]}"))
    return found


def ignored_types(source: Source) -> list[str]:
    """What mypy is told to ignore has a reason beside it."""
    bare = re.compile(r"# type: ignore(\[[^]]*\])?$")
    lines = enumerate(source.text.splitlines(), 1)
    return [source.at(number, "ignores a type without a reason") for number, line in lines if bare.search(line)]


def docstrings(source: Source) -> list[str]:
    """Modules, and public classes and functions at their top level or in their classes, say what they are for."""
    found = [] if ast.get_docstring(source.tree) or not source.tree.body else [source.at(1, "the module says nothing")]
    owners: list[ast.Module | ast.ClassDef] = [source.tree]
    owners += [node for node in source.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                if not overload and not ast.get_docstring(node):
                    found.append(source.at(node, f"{node.name} has no docstring"))
    return found


def exported(source: Source) -> set[str] | None:
    """Return what ``__all__`` lists, None where there is none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return None


def exports(source: Source) -> list[str]:
    """``__all__`` lists every public class and function of a file, and nothing that is not there."""
    listed = exported(source)
    defined = {n.name for n in source.tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    public = {name for name in defined if not name.startswith("_")}
    if source.path.endswith("__init__.py"):
        public |= {name for name in source.bindings if not name.startswith("_") and name != "annotations"}
    if listed is None:
        return [source.at(1, f"no __all__, but {sorted(public)}")] if public else []
    stored = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known = defined | stored | set(source.bindings)
    found = [source.at(1, f"__all__ lacks {name}") for name in sorted(public - listed)]
    return found + [source.at(1, f"__all__ lists {name}, which is not there") for name in sorted(listed - known)]


def lonely_bases(sources: Iterable[Source]) -> list[str]:
    """No class of the package has exactly one subclass in it."""
    defined: dict[str, str] = {}
    children: dict[str, list[str]] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                defined[node.name] = source.at(node, node.name)
                for base in node.bases:
                    children.setdefault(ast.unparse(base).split("[")[0], []).append(node.name)
    return [
        f"{where} has one subclass: {children[name]}"
        for name, where in defined.items()
        if len(children.get(name, ())) == 1
    ]
