"""The house rules hold; and each rule is able to find what it is there to find."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.fsdp as theirs

import fsdp2
from tests.support import ROOT, rules
from tests.support.docs import (
    EXTRA_METHODS,
    EXTRA_NAMES,
    EXTRA_PARAMETERS,
    NEWER_METHODS,
    NEWER_NAMES,
    NEWER_PARAMETERS,
)
from tests.support.rules import Source

Rule = Callable[[Source], list[str]]


def files(folder: str) -> list[Source]:
    """Return the Python files below a folder of the repository."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


PACKAGE = files("fsdp2")
EVERYTHING = [source for folder in ("fsdp2", "tests", "examples", "benchmarks") for source in files(folder)]


@functools.cache  # and not when this file is imported, which every worker does, whatever it runs
def own_private_names() -> set[str]:
    """Return the private names that the package itself defines."""
    return rules.own_private_names(PACKAGE)


def private_torch(source: Source) -> list[str]:
    """Private names of torch stand in _torch only."""
    return rules.private_torch(source, own_private_names())


IN_THE_PACKAGE: list[Rule] = [
    rules.import_direction,
    rules.collectives,
    rules.streams,
    private_torch,
    rules.grad_assignments,
    rules.hook_registration,
    rules.environment,
    rules.module_names,
    rules.ignored_types,
    rules.docstrings,
    rules.exports,
]


def name_of(rule: Rule) -> str:
    """Return the rule's name for the test's."""
    return rule.__name__


def test_the_rules_see_the_package():
    """The files that rules except by name exist; otherwise the rules would be about nothing."""
    paths = {source.path for source in EVERYTHING}
    assert {
        "fsdp2/_torch/tensors.py",
        "fsdp2/comm/collectives.py",
        "fsdp2/comm/streams.py",
        "fsdp2/autograd/hooks.py",
        "fsdp2/engine/param.py",
        "tests/test_architecture.py",
    } <= paths


@pytest.mark.parametrize("rule", IN_THE_PACKAGE, ids=name_of)
def test_in_the_package(rule):
    """Rules for the package."""
    complaints = [complaint for source in PACKAGE for complaint in rule(source)]
    assert not complaints, "\n".join([rule.__doc__ or "", *complaints])


def test_no_import_leads_back():
    """There is no import cycle anywhere, those of types included."""
    complaints = rules.import_cycles(PACKAGE)
    assert not complaints, "\n".join(complaints)


def test_every_folder_keeps_its_order():
    """A folder's files import only from those that its ``__init__.py`` lists behind them."""
    complaints = rules.folder_order(PACKAGE)
    assert not complaints, "\n".join(complaints)


def test_no_base_class_for_one():
    """A base class with one subclass is that subclass in two places."""
    assert not rules.lonely_bases(PACKAGE)


def test_every_stage_of_the_life_of_a_parameter_is_cited():
    """The code says where it performs each stage that DESIGN.md numbers, and cites no other."""
    section = (ROOT / "DESIGN.md").read_text().split("## The life of a parameter")[1].split("\n## ")[0]
    cited: set[int] = set()
    for source in PACKAGE:
        text = " ".join(source.text.split())
        for first, last in re.findall(r"[Ss]tages? (\d)(?: (?:to|and) (\d))? of the life of a parameter", text):
            cited.update(range(int(first), int(last or first) + 1))
    assert cited == {int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)}


def test_only_unit_tests_read_the_engine():
    """Others look from outside, so that they judge any engine alike. The exceptions read options, swap lanes, and call
    a hook at a wrong time."""
    found = {source.path for source in EVERYTHING if "._get_fsdp_state()" in source.text}
    others = {path for path in found if path.startswith("tests/") and not path.startswith("tests/unit/")}
    allowed = {"tests/support/inside.py", "tests/gpu/test_nccl.py", "tests/docs/remedies.py"}
    assert others - {"tests/test_architecture.py"} == allowed


def test_no_utils():
    """A file is named after what is in it."""
    names = {Path(source.path).name for source in PACKAGE}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


GOOD = {
    rules.import_direction: "from fsdp2.comm.b import c\nfrom fsdp2 import policies\nfrom .d import e",
    rules.collectives: """
import torch.distributed as dist
from fsdp2.comm.collectives import all_gather
all_gather(1)
dist.new_group()
options.reduce_scatter
""",
    rules.streams: "import torch\ndef f(e: torch.cuda.Event | None) -> torch.Stream: lane.wait(e)",
    private_torch: """
import sys, torch
self._anything
x.__dict__
torch.nn.Module
group._get_fsdp_state()
sys._getframe()
""",
    rules.grad_assignments: "x = p.grad\np.grad.add_(1)\np.gradient = 2",
    rules.hook_registration: "hook_gradient(p, f)\nregister(hook)",
    rules.environment: "import os\nos.path.join('environ')",
    rules.module_names: "f'{class_name(module)} {type(value).__name__}'",
    rules.ignored_types: "x = f()  # type: ignore[misc]  # untyped",
    rules.docstrings: "'''Text.'''\ndef _f(): ...\ndef g():\n  '''Text.'''",
    rules.exports: "__all__ = ['f', 'X']\ndef f(): ...\ndef _g(): ...\nX = 1",
}
BAD: list[tuple[Rule, str, str]] = [
    (rules.import_direction, "fsdp2/comm/a.py", "from fsdp2.engine.param import FSDPParam"),
    (rules.import_direction, "fsdp2/sharding/a.py", "from fsdp2 import comm"),
    (rules.import_direction, "fsdp2/engine/a.py", "import fsdp2.module"),
    (rules.import_direction, "fsdp2/engine/a.py", "from ..module import FSDPModule"),
    (rules.import_direction, "fsdp2/_torch/a.py", "from fsdp2._trace import emit"),
    (rules.import_direction, "fsdp2/module.py", "from fsdp2 import __init__"),
    (rules.import_direction, "fsdp2/module.py", "from fsdp2.fsdp1.install import install"),
    (rules.import_direction, "fsdp2/grouping/collect.py", "import fsdp2"),
    (rules.import_direction, "fsdp2/engine/a.py", "from fsdp2.weights.state_dict.names import clean_name"),
    (rules.import_direction, "fsdp2/engine/b.py", "from fsdp2.grouping.grouping import Unit"),
    (rules.import_direction, "fsdp2/weights/a.py", "if TYPE_CHECKING:\n    from fsdp2.module import FSDPModule"),
    (rules.import_direction, "fsdp2/extra/a.py", "import os"),
    (rules.import_direction, "fsdp2/engine/a.py", "from fsdp2.extra import b"),
    (rules.collectives, "fsdp2/engine/a.py", "import torch.distributed as d\nd.all_reduce(x)"),
    (rules.collectives, "fsdp2/engine/a.py", "import torch\ntorch.distributed.all_gather_into_tensor(x, y)"),
    (rules.collectives, "fsdp2/engine/a.py", "from torch.distributed import broadcast as b"),
    (rules.collectives, "fsdp2/engine/a.py", "from torch import distributed\ndistributed.reduce_scatter_single(x, y)"),
    (rules.collectives, "fsdp2/engine/a.py", "group._allgather_base(x, y)"),
    (rules.collectives, "fsdp2/engine/a.py", "import torch\ntorch.ops.c10d.allreduce_(x)"),
    (rules.collectives, "fsdp2/engine/a.py", "from fsdp2._torch.collectives import coalescing_manager"),
    (
        rules.collectives,
        "fsdp2/engine/a.py",
        "from torch.distributed._functional_collectives import all_to_all_single",
    ),
    (rules.streams, "fsdp2/engine/a.py", "import torch\ntorch.cuda.current_stream()"),
    (rules.streams, "fsdp2/engine/a.py", "from torch.cuda import Stream"),
    (rules.streams, "fsdp2/engine/a.py", "tensor.record_stream(s)"),
    (private_torch, "fsdp2/engine/a.py", "from torch._C import x"),
    (private_torch, "fsdp2/engine/a.py", "import torch._dynamo"),
    (private_torch, "fsdp2/engine/a.py", "from torch.distributed._composable import contract"),
    (private_torch, "fsdp2/engine/a.py", "from torch.distributed.utils import _apply_to_tensors"),
    (private_torch, "fsdp2/engine/a.py", "import torch\ntorch._foreach_copy_(a, b)"),
    (private_torch, "fsdp2/engine/a.py", "from torch import autograd\nautograd._profiler_enabled()"),
    (private_torch, "fsdp2/engine/a.py", "tensor._some_private_thing_of_torch"),
    (rules.grad_assignments, "fsdp2/engine/a.py", "p.grad = None"),
    (rules.grad_assignments, "fsdp2/engine/a.py", "p.grad += g"),
    (rules.grad_assignments, "fsdp2/engine/a.py", "x, p.grad = g"),
    (rules.grad_assignments, "fsdp2/engine/a.py", "del p.grad"),
    (rules.grad_assignments, "fsdp2/engine/a.py", "setattr(p, 'grad', g)"),
    (rules.hook_registration, "fsdp2/engine/a.py", "t.register_hook(f)"),
    (rules.hook_registration, "fsdp2/engine/a.py", "register_optimizer_step_pre_hook(f)"),
    (rules.hook_registration, "fsdp2/engine/a.py", "register = p.register_post_accumulate_grad_hook"),
    (rules.environment, "fsdp2/a.py", "import os\nos.environ['X']"),
    (rules.environment, "fsdp2/a.py", "from os import getenv\ngetenv('X')"),
    (rules.module_names, "fsdp2/a.py", "f'{type(module).__name__}'"),
    (rules.module_names, "fsdp2/a.py", "f'{type(self.modules[0]).__name__} {1}'"),
    (rules.module_names, "fsdp2/a.py", "f'{type(site.module).__name__}'"),
    (rules.ignored_types, "fsdp2/a.py", "x = f()  # type: ignore[misc]"),
    (rules.ignored_types, "fsdp2/a.py", "x = f()  # type: ignore\ny = 1"),
    (rules.docstrings, "fsdp2/a.py", "'''Text.'''\ndef g(): ..."),
    (rules.docstrings, "fsdp2/a.py", "def _g(): ..."),
    (rules.docstrings, "fsdp2/a.py", "'''Text.'''\nclass A:\n '''Text.'''\n def m(self): ..."),
    (rules.exports, "fsdp2/a.py", "__all__ = []\ndef f(): ..."),
    (rules.exports, "fsdp2/a.py", "def f(): ..."),
    (rules.exports, "fsdp2/a.py", "__all__ = ['f']"),
    (rules.exports, "fsdp2/__init__.py", "from fsdp2.module import share_comm_ctx\n__all__ = []"),
]


@pytest.mark.parametrize("rule", GOOD, ids=name_of)
def test_rules_accept_what_is_good(rule):
    """No rule complains about what is allowed."""
    assert rule(Source("fsdp2/engine/a.py", GOOD[rule])) == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_rules_find_what_is_bad(rule, path, text):
    """Every rule complains about what is not."""
    assert rule(Source(path, text))


def test_lonely_bases_are_found():
    """Exactly one subclass is one too few, or one base too many."""
    one = Source("fsdp2/a.py", "class A: ...\nclass B(A): ...")
    two = Source("fsdp2/b.py", "class C(A): ...")
    assert rules.lonely_bases([one]) and not rules.lonely_bases([one, two])


def test_cycles_are_found():
    """Also one of three files, and one through what is imported for its types alone."""
    a, b = Source("fsdp2/a.py", "from fsdp2.b import x"), Source("fsdp2/b.py", "import fsdp2.c")
    c = Source("fsdp2/c.py", "if TYPE_CHECKING:\n    from fsdp2 import a")
    assert len(rules.import_cycles([a, b, c])) == 3
    assert not rules.import_cycles([a, b, Source("fsdp2/c.py", "from fsdp2 import d")])


@pytest.mark.parametrize(
    ("listed", "complaints"),
    [
        ("upper  does this\nlower  does that", 0),
        ("lower  does that\nupper  does this", 1),
        ("upper  does this", 2),  # lower is not listed, so it stands nowhere
        ("upper  does this\nlower  does that\ngone  was there", 1),
    ],
)
def test_orders_of_folders_are_kept(listed: str, complaints: int):
    """Each file is listed, and imports only what is listed behind it."""
    init = Source("fsdp2/a/__init__.py", f"'''Text.\n\n{listed}\n'''")
    upper, lower = Source("fsdp2/a/upper.py", "from fsdp2.a.lower import x"), Source("fsdp2/a/lower.py", "x = 1")
    assert len(rules.folder_order([init, upper, lower])) == complaints


def test_every_rule_is_tried():
    """No rule without a snippet that it rejects."""
    assert {rule for rule, _, _ in BAD} == {*IN_THE_PACKAGE}


# ---- the public surface ----

FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
METHODS = [name for name in vars(theirs.FSDPModule) if not name.startswith("_")]


def test_public_names():
    """The package exports what torch's has for composable sharding, and documented extras."""
    fsdp1 = ("FullyShardedDataParallel", "StateDict", "OptimStateDict", "Config", "ShardingStrategy", "StateKeyType")
    old = {"BackwardPrefetch", "CPUOffload", "MixedPrecision", "OptimStateKeyType"}
    wanted = {name for name in theirs.__all__ if not any(part in name for part in fsdp1)} - old
    assert set(fsdp2.__all__) == wanted | EXTRA_NAMES | NEWER_NAMES
    for name in fsdp2.__all__:
        assert getattr(fsdp2, name).__doc__, name


@pytest.mark.parametrize("name", METHODS)
def test_every_public_method_is_our_own(name):
    """No method of torch's FSDPModule is inherited, also not one that a new torch adds."""
    assert name in vars(fsdp2.FSDPModule)


def test_no_undocumented_methods():
    """What we add to FSDPModule is listed in tests/support/docs.py."""
    public = {name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")}
    assert public == {*METHODS, *EXTRA_METHODS, *NEWER_METHODS}


def shape(function: object) -> list[tuple[str, object, object]]:
    """Return name, kind and default of each parameter."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_signatures_equal_torchs(name):
    """Names, kinds and defaults of parameters agree, documented extras aside."""
    ours, original = (getattr(home, name, None) or getattr(home.FSDPModule, name) for home in (fsdp2, theirs))
    newer = NEWER_PARAMETERS.get(name, set()) - {entry[0] for entry in shape(original)}
    extra = EXTRA_PARAMETERS.get(name, set()) | newer
    assert [entry for entry in shape(ours) if entry[0] not in extra] == shape(original)
    assert extra <= {entry[0] for entry in shape(ours)}


# ---- _torch ----


def private_paths(source: Source) -> set[str]:
    """Return the full names of everything private of torch that a file names."""
    names = {name for _, name in source.imported()} | {source.dotted(node) for node in ast.walk(source.tree)}
    return {name for name in names if name.startswith("torch.") and any(map(rules.is_private, name.split(".")))}


PRIVATE = [source for source in PACKAGE if source.component == "_torch"]


@pytest.mark.parametrize("path", sorted({path for source in PRIVATE for path in private_paths(source)}))
def test_private_names_exist(path):
    """The installed torch still has every private name that _torch leans on."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        assert found is not None
        return
    pytest.fail(f"{path} cannot be imported")


@pytest.mark.parametrize("source", PRIVATE, ids=lambda source: source.path)
def test_private_names_have_reasons(source):
    """Each import, assignment and function of _torch comes with a comment or a docstring."""
    lines = source.text.splitlines()
    missing = []
    for node in source.tree.body:
        private = {path for path in private_paths(Source(source.path, ast.unparse(node))) if path}
        documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
        first = node.lineno - 2
        while first > 0 and lines[first].startswith(("from ", "    ", ")")):  # one comment may explain two imports
            first -= 1
        if private and not documented and not lines[first].startswith("#"):
            missing.append(source.at(node, "no reason given"))
    assert not missing


def test_all_of_torch_is_used():
    """Nothing stays in _torch that the package no longer needs."""
    used = {name for source in PACKAGE for _, name in source.imported() if name.startswith("fsdp2._torch.")}
    files = {source.path.removesuffix(".py").replace("/", "."): source for source in PRIVATE}
    assert {f"{file}.{name}" for file, source in files.items() for name in rules.exported(source) or ()} <= used
