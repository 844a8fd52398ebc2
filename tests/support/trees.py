"""Random models and how they are sharded, as plain data: a tree of small modules, any of which may be a unit.

``Plan`` travels to worker processes and can be shrunk; ``build`` makes the model, ``shard`` shards it. Every row of the
result depends on its own row of the input only, so ranks may share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.models import Listed, Odd, Tied, Transposed, mlp
from tests.support.parity import mesh_1d, mesh_of
from tests.support.shapes import ReturnsView, Wraps, first_tensor

WIDTH = 6
DIVIDE = 2.0
"""How much smaller gradients are that are divided by another number than the mean's."""
LARGE = 11000
"""How many columns a large layer has."""


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.other = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.single(x) * self.other.to(x.dtype)


class Detached(nn.Module):
    """Uses its weight detached as well, before and after the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.layer.weight.detach())
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.detach())


class Conv(nn.Module):
    """A convolution whose weight is in channels_last format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 1, 3)).flatten(1)


class Buffered(nn.Module):
    """A weight and a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift.to(x.dtype)


class Twice(nn.Module):
    """Calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Large(nn.Sequential):
    """Two matrices whose gradients, in float32, are as large as those that gloo's ranks send each other directly.

    A step moves all of their columns in one direction. Their sum is scaled, so that it moves by no more than the result
    of a small layer does. It would move by hundreds, and what rounding had made different with it.
    """

    def __init__(self) -> None:
        super().__init__(*mlp(WIDTH, LARGE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (WIDTH / LARGE) ** 0.5


class Cache:
    """What parts leave for later ones, as attention layers leave keys and values; it is passed to every unit."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Keeps(nn.Module):
    """Leaves a result in the cache: one that its own result is computed with, or another ``aside``."""

    def __init__(self, *, aside: bool) -> None:
        super().__init__()
        self.aside = aside
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        query = self.query(x)
        if cache is not None:
            cache.kept.append(self.key(x) if self.aside else query)
        return torch.tanh(query)


class Reads(nn.Module):
    """Computes with what an earlier part left in the cache, if one did."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        return self.layer(x) if cache is None or not cache.kept else self.layer(x) + cache.kept[0]


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: mlp(WIDTH, 40, WIDTH),
    "large": Large,
    "uneven": lambda: mlp(WIDTH, 5, WIDTH),
    "single": lambda: mlp(WIDTH, 1, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "half frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
    "tied": Tied,
    "mixed": Mixed,
    "detached": Detached,
    "conv": Conv,
    "odd": lambda: Odd(scale=torch.randn(()), cube=torch.randn(3, 5, 2), index=torch.arange(7), row=torch.randn(1, 7)),
    "strided": lambda: nn.Sequential(Transposed(), nn.Linear(6, WIDTH)),
    "listed": Listed,
    "buffered": Buffered,
    "twice": Twice,
    "view": lambda: ReturnsView(WIDTH),
    "dict": lambda: Wraps("dict"),
    "object": lambda: Wraps("object"),
    "tuple": lambda: Wraps("with_none"),
    "keeps": lambda: Keeps(aside=False),
    "keeps aside": lambda: Keeps(aside=True),
    "reads": Reads,
    "empty": nn.Tanh,
}
ACROSS: dict[str, Any] = {
    "linear": ColwiseParallel(output_layouts=Replicate()),
    "wide": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "large": {"0": ColwiseParallel(), "2": RowwiseParallel()},
}
"""How kinds of leaves are cut over ranks that have the same rows."""
CACHING = {"keeps", "keeps aside", "reads"}
"""Kinds that are given the cache."""
MAY_CHANGE = {"linear", "wide", "uneven", "norm", "frozen", "tied", "view", "dict", "object"}
"""Kinds whose result may be changed in place, unless it is recomputed: nothing saved it for backward."""
ORDINARY = ("linear", "wide", "uneven", "single", "norm", "frozen", "tied", "twice", "dict", "empty")
"""Kinds that torch's fully_shard trains as well."""
CONTAINERS = {"dict", "object", "tuple"}
"""Kinds that return no tensor, which reentrant checkpointing needs."""


RECOMPUTE = ("around", "inside", "reentrant", "selective", "on the CPU")


@dataclass(frozen=True)
class Node:
    """A module of the tree: a leaf of some kind, or several in a row.

    ``joins``: in one unit with the unit before it among its siblings. ``recompute``: "", or one of ``RECOMPUTE``; what
    is saved for backward is kept on the CPU by the last of them. ``ties``: a linear leaf that shares its weight with
    the first of the tree. ``in_place``: its result is changed in place, if that is of a kind that allows it. ``twice``:
    it runs twice in a row.
    """

    kind: str
    children: tuple[Node, ...] = ()
    unit: bool = False
    joins: bool = False
    reshard: bool | int | None = None
    recompute: str = ""
    ties: bool = False
    in_place: bool = False
    twice: bool = False


class Tree(nn.Module):
    """What a node becomes. ``alone`` in the single process, which recomputes nothing.

    ``after_backward`` is called with a part when backward has the gradient of its input.
    """

    def __init__(self, node: Node, *, saved: bool = False) -> None:
        """``saved``: a selective checkpoint around it saves results of products, which must not be changed."""
        super().__init__()
        self.node = node
        self.skipped = self.alone = False
        self.changes = node.in_place and node.kind in MAY_CHANGE and not node.recompute and not saved
        self.after_backward: Callable[[Tree], None] | None = None
        self.inner = LEAVES[node.kind]() if node.kind in LEAVES else None
        saved = saved or node.recompute == "selective"
        self.parts = nn.ModuleList(Tree(child, saved=saved) for child in node.children)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
        if self.node.recompute:  # as in use: what is recomputed would leave its results a second time
            cache = None
        if self.node.recompute == "inside" and not self.alone:
            return checkpoint(self.compute, x, cache, use_reentrant=False)
        return self.compute(x, cache)

    def compute(self, x: Tensor, cache: Cache | None) -> Any:
        """Return what forward returns."""
        if self.inner is not None:
            return self.inner(x, cache) if self.node.kind in CACHING else self.inner(x)
        for part in self.parts:
            if not part.skipped:
                if self.after_backward is not None and x.requires_grad:
                    x.register_hook(partial(self._passed, part))
                y = first_tensor(self.call(part, x, cache))
                if part.node.twice:
                    y = first_tensor(self.call(part, torch.tanh(y), cache))
                if part.changes:
                    y *= 0.5
                    y += x
                elif part.node.in_place:
                    y = y * 0.5 + x
                x = x + torch.tanh(y)
        return x

    def _passed(self, part: Tree, grad: Tensor) -> None:
        if self.after_backward is not None:
            self.after_backward(part)

    def call(self, part: Tree, x: Tensor, cache: Cache | None) -> Any:
        """Return what a part returns, recomputed in backward if it should be."""
        how = part.node.recompute
        if self.alone or how in ("", "inside") or not torch.is_grad_enabled():
            return part(x, cache)
        if how == "on the CPU":
            # Not save_on_cpu: on a CPU it saves the very tensors, and a result that saves itself is never freed.
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved):
                return part(x, cache)
        if how == "selective":
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            return checkpoint(part, x, use_reentrant=False, context_fn=contexts)
        reentrant = part.node.recompute == "reentrant" and part.node.kind not in CONTAINERS and x.requires_grad
        return checkpoint(part, x, use_reentrant=reentrant)


def keep_products(context: Any, operator: Any, *unused: object, **others: object) -> CheckpointPolicy:
    """Save the results of products of matrices, and recompute the others."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class Root(nn.Module):
    """A tree, experts of which each rank has one, and a last layer of the root's own."""

    def __init__(self, nodes: tuple[Node, ...], caches: bool, experts: int) -> None:
        super().__init__()
        self.caches = caches
        self.tree = Tree(Node("", nodes))
        self.experts = nn.ModuleDict({f"expert{i}": nn.Linear(WIDTH, WIDTH) for i in range(experts)})
        self.expert = ""  # which one computes
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tree(x, Cache() if self.caches else None)
        if self.expert:
            x = x + torch.tanh(self.experts[self.expert](x))
        return self.last(x)


POLICIES = {
    "plain": MixedPrecisionPolicy(),
    "double": MixedPrecisionPolicy(param_dtype=torch.float64),
    "double reduced": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "double forth and back": MixedPrecisionPolicy(torch.float64, torch.float32),
    "low": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
MESHES = ("flat", "hybrid", "over replicas", "copies")
PLACEMENTS: dict[str, Callable[[nn.Parameter], Shard | None] | None] = {
    "first": None,
    "last": lambda parameter: Shard(max(parameter.ndim - 1, 0)) if parameter.ndim else None,
    "various": lambda parameter: Shard(parameter.numel() % parameter.ndim) if parameter.ndim else None,
}


@dataclass(frozen=True)
class Plan:
    """A model and the options of its sharding.

    ``mesh``: "flat", "hybrid", "over replicas" (the same without copies), or "copies", where each rank has whole
    parameters. ``caches``: units are given a cache. ``experts``: ranks have experts on meshes of their own, under names
    of their own. ``last``: the last layer is a unit of its own, so the root has no parameters where every part is in a
    unit. ``divide``: sums of gradients are divided by twice as much as for their mean. ``deterministic``: gradients are
    summed in one order of ranks. ``tensor_parallel``: linear layers are cut over pairs of ranks, which have the same
    rows; not with experts. ``compiled``: parts that are units are, with one of Dynamo's backends.
    """

    nodes: tuple[Node, ...]
    root_reshard: bool | int | None = None
    mesh: str = "flat"
    policy: str = "plain"
    placement: str = "first"
    transfer: str = "packed"
    offload: bool = False
    input_needs_grad: bool = False
    caches: bool = False
    experts: bool = False
    last: bool = False
    divide: bool = False
    deterministic: bool = False
    tensor_parallel: bool = False
    compiled: str = ""

    def across(self, world: int) -> int:
        """Return over how many of so many ranks linear layers are cut."""
        return halves(world) if self.tensor_parallel and not self.experts else 1

    @property
    def repeats(self) -> int:
        """How often the layer runs that runs most often in a forward: twice for each tree around it that runs twice."""

        def of(node: Node) -> int:
            return (1 + node.twice) * max(map(of, node.children), default=1)

        return max(map(of, self.nodes), default=1)

    @property
    def is_simple(self) -> bool:
        """Whether each unit is used by itself and once, so that backward is through with it when it leaves it."""
        return not any(node.joins or node.recompute or node.ties or node.twice for node in self.all_nodes())

    @property
    def backend(self) -> str:
        """What compiles units, if anything does.

        Of results that nothing uses, a graph of AOTAutograd has zeros as gradients. A checkpoint may find another graph
        than its forward, of the same code for another part.
        """
        recomputed = any(node.recompute for node in self.all_nodes())
        return "eager" if self.compiled and (self.caches or recomputed) else self.compiled

    def all_nodes(self) -> Iterator[Node]:
        """Yield the nodes of the tree."""
        waiting = [*self.nodes]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            yield node

    def build(self, world: int = 1) -> Root:
        """Return the model for so many ranks, equal on every call, with the experts of all ranks."""
        torch.manual_seed(7)
        model = Root(self.nodes, self.caches, halves(world) if self.experts else 0)
        linears = [tree for tree in trees(model) if tree.node.kind in ("linear", "frozen")]
        for tree in linears[1:]:
            if tree.node.ties:
                assert tree.inner is not None and linears[0].inner is not None
                tree.inner.weight = linears[0].inner.weight
        return model

    def shard(self, model: Root, fsdp: Any) -> None:
        """Shard units from the inside out, and the root; of the experts this rank keeps its own."""
        across = self.across(dist.get_world_size())
        world = dist.get_world_size() // across  # ranks with rows of their own
        sizes, names = [world], ["shard"]
        if self.mesh != "flat":
            copies = world if self.mesh == "copies" else halves(world)
            sizes, names = [copies, world // copies], ["replicate", "shard"]
        if across > 1:
            pairs = mesh_of(*sizes, across, names=[*names, "across"])
            mesh = pairs[tuple(names)]
            for tree in trees(model):
                plan = ACROSS.get(tree.node.kind)
                if plan is not None and tree.inner is not None and not any(node.ties for node in self.all_nodes()):
                    parallelize_module(tree.inner, pairs["across"], plan)
                    tree.changes = False  # its result is a view of a DTensor
        else:
            mesh = mesh_of(*sizes, names=names) if self.mesh != "flat" else mesh_1d()
        if self.compiled:
            torch._dynamo.reset()
            for tree in trees(model):
                if tree.node.unit:
                    tree.compile(backend=self.backend)
        options = {
            "mesh": mesh,
            "mp_policy": POLICIES[self.policy],
            "shard_placement_fn": PLACEMENTS[self.placement],
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy(),
        }
        over = {"shard_over_replicas": True} if self.mesh == "over replicas" else {}
        axis = 1 if over else mesh.size(mesh.ndim - 1)  # over replicas, a number of ranks is refused

        def reshard(asked: bool | int | None) -> bool | int | None:
            possible = isinstance(asked, (bool, type(None))) or (axis > asked and axis % asked == 0)
            return asked if possible else True

        for unit, asked in units(model.tree):
            fsdp.fully_shard(unit, reshard_after_forward=reshard(asked), **options, **over)
        if self.experts:
            within = mesh_of(halves(world), world // halves(world), names=("expert", "within"))["within"]
            for expert in model.experts.values():
                fsdp.fully_shard(expert, **{**options, "mesh": within})
                expert.set_gradient_divide_factor(world)  # the loss is the mean over all ranks
        if self.last:
            fsdp.fully_shard(model.last, **options, **over)
        fsdp.fully_shard(model, reshard_after_forward=reshard(self.root_reshard), **options, **over)
        if self.divide:
            for unit in model.modules():
                if isinstance(unit, fsdp.FSDPModule):
                    unit.set_gradient_divide_factor(DIVIDE * world)
        if self.deterministic:
            model.set_deterministic_reduction(True)


def halves(world: int) -> int:
    """Return 2 where that divides the number of ranks, else 1."""
    return 2 if world % 2 == 0 else 1


def expert_of(rank: int, world: int) -> str:
    """Return the name of the expert that a rank has."""
    return f"expert{rank * halves(world) // world}"


def trees(model: nn.Module) -> list[Tree]:
    """Return every tree of a model but the topmost."""
    return [module for module in model.modules() if isinstance(module, Tree)][1:]


def units(tree: Tree) -> Iterator[tuple[Any, bool | int | None]]:
    """Yield what is to be passed to ``fully_shard`` below a tree, innermost first."""
    for part in tree.parts:
        yield from units(part)
    groups: list[list[Tree]] = []
    for part in tree.parts:
        if part.node.unit and part.node.joins and groups:
            groups[-1].append(part)
        elif part.node.unit:
            groups.append([part])
    for group in groups:
        yield (group if len(group) > 1 else group[0]), group[0].node.reshard


NODE_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "joins": st.integers(0, 2).map(lambda i: i == 2),
    "reshard": st.sampled_from([None, True, False, 2]),
    "recompute": st.sampled_from(["", *RECOMPUTE]),
    "ties": st.integers(0, 2).map(lambda i: i == 2),
    "in_place": st.integers(0, 2).map(lambda i: i == 2),
    "twice": st.integers(0, 2).map(lambda i: i == 2),
}
ORDINARY_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "joins": NODE_OPTIONS["joins"],
    "reshard": st.sampled_from([None, True, False]),
    "recompute": st.sampled_from(["", "", "around", "inside"]),
}
PLAN_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "root_reshard": st.sampled_from([None, True, False, 2]),
    "placement": st.sampled_from(sorted(PLACEMENTS)),
    "transfer": st.just("direct"),
    "offload": st.just(True),
    "input_needs_grad": st.just(True),
    "last": st.just(True),
    "experts": st.just(True),
    "divide": st.just(True),
    "deterministic": st.just(True),
    "tensor_parallel": st.just(True),
    "compiled": st.sampled_from(["eager", "aot_eager"]),
}
ORDINARY_PLAN: dict[str, st.SearchStrategy[Any]] = {
    "root_reshard": st.sampled_from([None, True, False]),
    **{name: PLAN_OPTIONS[name] for name in ("transfer", "input_needs_grad", "last")},
}
OFTEN = ["large"] * 4
"""Kinds of leaves that only show something together with other choices, so they are drawn more often."""
NEEDED: dict[str, Iterable[str]] = {"caches": sorted(CACHING), "tensor_parallel": sorted(ACROSS)}
"""Options that do nothing without a leaf of one of these kinds."""


def nodes(kinds: list[str], options: dict[str, Any], depth: int) -> st.SearchStrategy[Node]:
    """Return a strategy for nodes of these ``kinds`` and ``options``, with at most ``depth`` levels below them."""
    options = {"unit": st.integers(0, 2).map(lambda i: i > 0), **options}
    leaf = st.builds(Node, kind=st.sampled_from(kinds), **options)
    if not depth:
        return leaf
    branch = st.lists(nodes(kinds, options, depth - 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(leaf, leaf, st.builds(Node, kind=st.just(""), children=branch, **options))


@st.composite
def plans(draw: st.DrawFn, *, ordinary: bool = False, meshes: Iterable[str] = MESHES) -> Plan:
    """Draw a plan on one of these ``meshes``, or one that torch's fully_shard carries out as well.

    First it is drawn what a plan may be made of: a few kinds of leaves, and some of the options with what they need. If
    each plan might have everything, nearly all would have a little of everything, and two things that only fail
    together, without a third, would hardly ever come together.
    """
    known = [*ORDINARY] if ordinary else [*sorted(LEAVES), *OFTEN]
    of_nodes = ORDINARY_OPTIONS if ordinary else NODE_OPTIONS
    of_node = {name: of_nodes[name] for name in draw(some_of(of_nodes, 0, 2))}
    depth = draw(st.sampled_from([0, 0, 0, 1, 2]))
    of_plans = ORDINARY_PLAN if ordinary else PLAN_OPTIONS
    chosen = {name: draw(of_plans[name]) for name in draw(some_of(of_plans, 0, 3))}
    if not ordinary:
        chosen["mesh"] = draw(st.sampled_from([*meshes]))
        chosen["policy"] = draw(st.sampled_from(["plain", "plain", "low", "low", *sorted(POLICIES)]))
        chosen["caches"] = draw(st.sampled_from([False, False, True]))
    kinds = draw(some_of(known, 1, 4))
    for option, needed in NEEDED.items():
        kinds += draw(some_of(needed, 1, 2)) if chosen.get(option) else []
    size = draw(st.integers(1, 4))  # which a list that chooses its own length would mostly make 1
    return Plan(tuple(draw(st.lists(nodes(kinds, of_node, depth), min_size=size, max_size=size))), **chosen)


def some_of(names: Iterable[str], least: int, most: int) -> st.SearchStrategy[list[str]]:
    """Return a strategy for ``least`` to ``most`` of ``names``; as few as many."""
    found = st.sampled_from([*names])
    return (
        st.integers(least, most)
        .flatmap(lambda size: st.lists(found, min_size=size, max_size=size))
        .map(lambda drawn: [*dict.fromkeys(drawn)])
    )
