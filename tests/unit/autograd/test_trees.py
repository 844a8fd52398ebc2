"""Finding and replacing tensors in whatever forward takes and returns."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from fsdp2.autograd.trees import Tree


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclass
class Record:
    """A dataclass."""

    value: Any
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    """A dataclass whose fields cannot be set."""

    value: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass without a ``__dict__``."""

    value: Any


class Private:
    """Attributes in ``__slots__``. Python stores the private name under another one, and the dunder name as it is."""

    __slots__ = ("__hidden", "__shown__", "plain")

    def __init__(self, *values: Tensor) -> None:
        self.__hidden, self.__shown__, self.plain = values


@dataclass
class OwnInit:
    """A dataclass that cannot be rebuilt from its fields: some are not arguments, an argument is no field."""

    scale: InitVar[int]
    value: Any = field(init=False)
    log: list[str] = field(init=False, default_factory=list)

    def __post_init__(self, scale: int) -> None:
        self.log.append("made")
        self.value = torch.full((2,), float(scale))


class Node:
    """A container that only pytree knows."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Fresh:
    """A container that gives pytree a new list each time it is asked for its children."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Box:
    """A plain object."""

    def __init__(self, value: Any) -> None:
        self.value = value


def find_tensors(tree: Any, *, results: bool = True) -> list[Tensor]:
    """Return the tensors in ``tree``, hidden ones included."""
    found = Tree((tree,), results=results)
    return [*found.tensors, *found.hidden]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, *, results: bool = False) -> Any:
    """Return ``tree`` with every tensor replaced, but for hidden ones."""
    found = Tree((tree,), results=results)
    found.tensors = [function(t) for t in found.tensors]
    return found.rebuilt()[0]


NAMES = "tests.unit.autograd.test_trees."
pytree.register_pytree_node(
    Node, lambda n: (list(n.parts), None), lambda parts, _: Node(*parts), serialized_type_name=NAMES + "Node"
)
pytree.register_pytree_node(
    Fresh,
    lambda n: ([{"v": n.value}], None),
    lambda c, _: Fresh(next(iter(c))["v"]),
    serialized_type_name=NAMES + "F",
)

CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, "text", b),
    "named_tuple": Pair,
    "dict": lambda a, b: {"a": a, 3: b},
    "ordered_dict": lambda a, b: OrderedDict(b=b, a=a),
    "default_dict": lambda a, b: defaultdict(list, a=a, b=b),
    "dataclass": lambda a, b: Record([a, b]),
    "frozen": lambda a, b: Frozen((a, b)),
    "slotted": lambda a, b: Slotted({"a": a, "b": b}),
    "pytree": Node,
    "deque": lambda a, b: deque([a, b], maxlen=5),
}
kinds = pytest.mark.parametrize("kind", CONTAINERS)


def parts_of(tree: Any) -> Iterator[Any]:
    """Yield what is inside ``tree``, by rules of our own."""
    if isinstance(tree, (list, tuple, deque)):
        yield from tree
    elif isinstance(tree, dict):
        yield from tree.values()
    elif is_dataclass(tree):
        yield from (getattr(tree, f.name) for f in fields(tree))
    elif isinstance(tree, Node):
        yield from tree.parts
    elif isinstance(tree, (Box, Fresh)):
        yield tree.value


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree without cycles, in order."""
    return [tree] if isinstance(tree, Tensor) else [t for part in parts_of(tree) for t in tensors(part)]


def assert_alike(new: Any, old: Any) -> None:
    """Assert that ``new`` is ``old`` with every tensor doubled: same types, keys and other leaves."""
    assert type(new) is type(old)
    if isinstance(old, Tensor):
        assert torch.equal(new, old * 2)
        return
    if isinstance(old, dict):
        assert list(new) == list(old)
    news, olds = list(parts_of(new)), list(parts_of(old))
    assert len(news) == len(olds)
    if not olds and not isinstance(old, (list, tuple, dict, deque)):
        assert new is old
    for a, b in zip(news, olds):
        assert_alike(a, b)


leaves = st.one_of(
    st.integers(0, 9).map(lambda i: torch.full((2,), float(i + 1))),
    st.sampled_from([None, 1, 2.5, "text", b"bytes", True, torch.float32, torch.Size([2]), torch.device("cpu"), int]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda kind, a, b: CONTAINERS[kind](a, b), st.sampled_from(sorted(CONTAINERS)), inner, inner
    ),
    max_leaves=8,
)


@given(st.lists(trees, max_size=4), st.booleans())
def test_every_tensor_is_found_once_in_order_and_replaced(values: list[Any], results: bool) -> None:
    """Types, keys and other leaves stay, the originals too; where nothing changes, these are what is returned."""
    before = [t.clone() for t in tensors(values)]
    found = Tree(values, results=results)
    assert [id(t) for t in (*found.tensors, *found.hidden)] == [id(t) for t in tensors(values)]
    assert found.rebuilt() is values
    found.tensors = [t * 2 for t in found.tensors]
    assert_alike([*found.rebuilt()], values)
    assert all(torch.equal(a, b) for a, b in zip(tensors(values), before))


@kinds
def test_only_what_holds_a_changed_tensor_is_rebuilt(kind: str) -> None:
    kept, changed = [torch.ones(1)], [torch.zeros(1)]
    tree = CONTAINERS[kind](kept, changed)
    new = map_tensors(lambda t: t + 1 if t is changed[0] else t, tree)
    assert new is not tree
    assert tensors(new)[0] is kept[0] or tensors(new)[1] is kept[0]
    assert sorted(t.item() for t in tensors(new)) == [1.0, 1.0]


def test_special_dicts_keep_what_makes_them_special() -> None:
    made = map_tensors(lambda t: t * 2, defaultdict(list, a=torch.ones(1)))
    assert made["missing"] == []
    ordered = map_tensors(lambda t: t * 2, OrderedDict(b=torch.ones(1), a=torch.ones(1)))
    ordered.move_to_end("b")
    assert list(ordered) == ["a", "b"]
    assert map_tensors(lambda t: t * 2, deque([torch.ones(1)], maxlen=1)).maxlen == 1


def test_walking_a_default_dict_makes_no_entries() -> None:
    tree: dict[str, Any] = defaultdict(list)
    assert find_tensors(tree) == [] and len(tree) == 0


def test_a_dataclass_is_copied_without_running_its_init_again() -> None:
    tree = OwnInit(3)
    new = map_tensors(lambda t: t * 2, tree)
    assert torch.equal(new.value, torch.full((2,), 6.0)) and torch.equal(tree.value, torch.full((2,), 3.0))
    assert new.log == ["made"]


@dataclass
class Output(OrderedDict):
    """An output with a field that is no item."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_a_dict_that_is_a_dataclass_has_items_and_fields() -> None:
    new = map_tensors(lambda t: t * 2, Output(torch.ones(2), torch.ones(1)))
    assert new["logits"].tolist() == [2.0, 2.0] and new.hidden.tolist() == [2.0]


def test_a_field_that_was_never_set_is_no_error() -> None:
    tree = OwnInit.__new__(OwnInit)
    assert find_tensors(tree) == []


def test_results_of_torch_operators_keep_their_type() -> None:
    new = map_tensors(lambda t: t * 2, torch.max(torch.ones(2, 2), 0))
    assert type(new) is torch.return_types.max
    assert torch.equal(new.values, torch.full((2,), 2.0))


def test_a_packed_sequence_stays_one() -> None:
    """Also where it is moved, although it cannot be made of lengths on a device."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    cast = map_tensors(lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, packed)
    assert type(cast) is type(packed) and cast.data.dtype is torch.bfloat16
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)
    moved = map_tensors(lambda t: t.to("meta"), packed)
    assert type(moved) is type(packed) and moved.data.is_meta


class Items(list):
    """A list with attributes."""


class Named(dict):
    """A dict with attributes."""


class Row(tuple):
    """A tuple with attributes."""


class AttributeDict(dict):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Spread(tuple):
    """A tuple that is made of its items."""

    def __new__(cls, *items: Any) -> Any:
        """Take items."""
        return super().__new__(cls, items)


class Twice(Pair):
    """A named tuple that is made of one item."""

    def __new__(cls, item: Any) -> Any:
        """Take the item of both names."""
        return Pair.__new__(cls, item, item)


@pytest.mark.parametrize(
    "tree",
    [Items([torch.ones(1)]), Named(a=torch.ones(1)), Row([torch.ones(1)]), Spread(torch.ones(1)), Twice(torch.ones(1))],
    ids=lambda tree: type(tree).__name__,
)
def test_a_subclass_of_a_container_keeps_its_class_items_and_attributes(tree: Any) -> None:
    tree.note = "kept"
    new = map_tensors(lambda t: t * 2, tree)
    assert_alike(new, tree)
    assert new.note == "kept" and len(new) == len(tree)


@pytest.mark.parametrize(
    "tree", [Items([1]), Named(a=1), Row([1]), Spread(1), Twice(1)], ids=lambda tree: type(tree).__name__
)
def test_tensors_in_attributes_of_a_subclass_of_a_container_are_found_and_replaced(tree: Any) -> None:
    """Fused losses put what they have computed on a model's output, a dict, as an attribute."""
    tree.value, tree.more = torch.ones(1), [torch.ones(1)]
    assert len(find_tensors(tree)) == 2
    new = map_tensors(lambda t: t * 2, tree)
    assert type(new) is type(tree) and len(new) == len(tree)
    assert (new.value.item(), new.more[0].item(), tree.value.item(), tree.more[0].item()) == (2.0, 2.0, 1.0, 1.0)


@pytest.mark.parametrize("tree", [Items([1]), Named(a=1), Row([1])], ids=lambda tree: type(tree).__name__)
def test_what_a_module_writes_to_attributes_of_a_container_is_written_to_the_original(tree: Any) -> None:
    tree.value, tree.dropped = torch.ones(1), 1
    found, given = copied(tree)
    before, given.value, given.added = given.value, 3, "text"
    del given.dropped
    found.carry_back()
    assert before.item() == 2.0 and vars(tree) == {"value": 3, "added": "text"} and len(tree) == 1


def test_a_dict_that_gives_its_items_as_attributes_still_does_so_when_it_is_copied() -> None:
    """``self.__dict__ = self``: the copy gave items that were cast, and attributes that were not."""
    tree = AttributeDict(x=torch.ones(1), y=[torch.ones(1)])
    assert len(find_tensors(tree)) == 2
    found, given = copied(tree)
    assert type(given) is AttributeDict and given.x is given["x"] and given.y[0].item() == given.x.item() == 2.0
    given.x, given["z"] = 4, 5
    del given["y"]
    found.carry_back()
    assert tree == {"x": 4, "z": 5} and tree.z == 5 and not hasattr(tree, "y")


def test_a_dict_that_is_a_dataclass_changes_as_both() -> None:
    """What the outputs of Hugging Face models are."""

    @dataclass
    class ModelOutput(OrderedDict):
        logits: Any = None

        def __post_init__(self) -> None:
            OrderedDict.__setitem__(self, "logits", self.logits)

        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            super().__setattr__(key, value)

    tree = ModelOutput(torch.ones(1))
    new = map_tensors(lambda t: t * 2, tree)
    assert type(new) is ModelOutput
    assert new.logits.item() == new["logits"].item() == 2.0
    assert tree.logits.item() == tree["logits"].item() == 1.0


# ---- plain objects ----


def test_plain_objects_are_searched_but_only_replaced_when_asked_for() -> None:
    tree = [Box({"a": torch.ones(1)}), torch.ones(1)]
    assert len(find_tensors(tree)) == 2
    for search in (True, False):
        found = Tree((tree,), search=search)
        assert len(found.tensors) == 1 and len(found.hidden) == search
    left = map_tensors(lambda t: t * 2, tree)
    assert left[0] is tree[0] and left[1].item() == 2.0
    copied = map_tensors(lambda t: t * 2, tree, results=True)
    assert copied[0] is not tree[0] and copied[0].value["a"].item() == 2.0
    assert tree[0].value["a"].item() == 1.0


def test_modules_functions_and_classes_are_not_searched() -> None:
    class Holder:
        value = torch.ones(1)

    def function() -> None: ...

    module = types.ModuleType("module")
    function.value = module.value = torch.ones(1)
    assert find_tensors([nn.Linear(2, 2), Holder, function, function.__call__, Box(module)]) == []


# ---- shared and cyclic structures, depth ----


def test_a_shared_part_is_walked_once_and_stays_shared() -> None:
    calls = []
    shared = [torch.ones(1)]
    new = map_tensors(lambda t: calls.append(t) or t * 2, {"a": shared, "b": (shared,)})
    assert len(calls) == 1
    assert new["a"] is new["b"][0]


def test_a_tensor_in_two_places_is_one_and_stays_one() -> None:
    """Attention projects query, key and value by one product if they are the same; they were three after a cast."""
    tensor = torch.ones(1)
    assert len(find_tensors((tensor, [tensor]))) == 1
    new = map_tensors(lambda t: t * 2, (tensor, [tensor]))
    assert new[0] is new[1][0]


@pytest.mark.parametrize("kind", ["list", "dict", "object"])
def test_cycles_end(kind: str) -> None:
    tree: Any = {"list": [torch.ones(1)], "dict": {"t": torch.ones(1)}, "object": Box(torch.ones(1))}[kind]
    if kind == "list":
        tree.append(tree)
    elif kind == "dict":
        tree["self"] = tree
    else:
        tree.itself = tree
    assert len(find_tensors(tree)) == 1
    assert map_tensors(lambda t: t, tree, results=True) is tree
    assert find_tensors(map_tensors(lambda t: t * 2, tree, results=True))[0].item() == 2.0


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    """Return a tensor inside so many levels."""
    tree: Any = torch.ones(1)
    for _ in range(depth):
        tree = wrap(tree)
    return tree


def test_the_depth_limit_is_64_levels_and_says_so() -> None:
    assert len(find_tensors(nested(64, lambda t: [t]))) == 1
    with pytest.raises(RuntimeError, match=r"nested deeper than 64 levels \(<class 'list'>\)"):
        find_tensors(nested(65, lambda t: [t]))


# ---- defects there were ----


def test_children_made_while_walking_are_not_mistaken_for_each_other() -> None:
    many = [Fresh(torch.full((1,), float(i))) for i in range(20)]
    assert [f.value.item() for f in map_tensors(lambda t: t * 2, many)] == [2.0 * i for i in range(20)]


def test_a_long_chain_of_plain_objects_is_no_error() -> None:
    """Hypotheses of a beam search that point to their parents, for example; torch's fully_shard does not look."""
    assert [len(find_tensors(nested(depth, Box))) for depth in (8, 9, 200)] == [1, 0, 0]


def test_items_that_are_no_fields_are_found() -> None:
    @dataclass
    class Output(dict):
        logits: Any = None

    tree = Output(torch.ones(1))
    tree["extra"] = torch.ones(1)
    assert len(find_tensors(tree)) == 2


def test_names_in_slots_are_those_under_which_python_stores_them() -> None:
    tensors = [torch.ones(i) for i in range(3)]
    assert sorted(tensor.numel() for tensor in find_tensors(Private(*tensors))) == [0, 1, 2]


# ---- what a module writes to copies ----


class Part:
    """What a module writes: it is not equal to anything else."""


def change(tree: Any, choose: Callable[[int], int], made: list[Any]) -> None:
    """Write to the containers in ``tree`` as ``choose`` says: replace, add, remove and move parts, at any depth."""
    for part in [*parts_of(tree)]:
        change(part, choose, made)
    if isinstance(tree, (list, deque)):
        what, place = choose(5), choose(max(len(tree), 1))
        if what == 1 and len(tree):
            tree[place] = make(made)
        elif what == 2:
            tree.append(make(made))
        elif what == 3 and len(tree):
            del tree[place]
        elif what == 4:
            tree.reverse()
    elif isinstance(tree, dict):
        what, keys = choose(4), [*tree]
        if what == 1:
            tree[keys[choose(len(keys))]] = make(made)
        elif what == 2:
            tree["new"] = make(made)
        elif what == 3:
            del tree[keys[choose(len(keys))]]
    elif isinstance(tree, (Record, Node)):
        what = choose(3)
        if what == 1 and isinstance(tree, Record):
            tree.value = make(made)
        elif what == 2:
            tree.added = make(made)


def make(made: list[Any]) -> Any:
    made.append(Part())
    return made[-1]


def outline(tree: Any, names: dict[int, Any]) -> Any:
    """Return the structure of ``tree`` with tensors and written parts by their names."""
    if id(tree) in names:
        return names[id(tree)]
    if isinstance(tree, dict):
        return type(tree), {key: outline(part, names) for key, part in tree.items()}
    inner = [outline(part, names) for part in parts_of(tree)]
    return type(tree), inner or repr(tree), outline(getattr(tree, "added", None), names) if tree is not None else None


@given(st.lists(trees, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_what_a_module_writes_to_copies_is_written_to_the_originals(values: list[Any], random: Any) -> None:
    """The model: the same writes to a twin that nobody copied. Immutable containers keep their parts."""
    seed = random.random()
    names = {id(t): i for i, t in enumerate(tensors(values))}
    twin = copy.deepcopy(values)
    twin_names = {id(t): i for i, t in enumerate(tensors(twin))}
    found = Tree(values)
    found.tensors = [t * 2 for t in found.tensors]
    given_to_module = found.rebuilt()
    outlines = []
    for written_to, known in ((twin, twin_names), (given_to_module, None)):
        made: list[Any] = []
        chooser = Random(seed)
        for value in written_to:
            change(value, chooser.randrange, made)
        if known is None:
            found.carry_back()
            known, written_to = names, values
        outlines.append(outline(written_to, known | {id(part): f"made {i}" for i, part in enumerate(made)}))
    assert outlines[0] == outlines[1]


def copied(value: Any) -> tuple[Tree, Any]:
    """Return the copy of ``value`` that a module gets whose inputs are cast, and the tree that has made it."""
    found = Tree((value,))
    found.tensors = [t * 2 for t in found.tensors]
    (copy,) = found.rebuilt()
    return found, copy


class Kept(Node):
    """A node whose children are its list, and that is built again around a list."""


class Copying(Node):
    """A node whose only child is its list, and that is built again with a copy of it."""


def with_parts(kind: type[Node], parts: list[Any]) -> Node:
    """Return a node that has ``parts`` itself."""
    node = kind()
    node.parts = parts
    return node


pytree.register_pytree_node(
    Kept,
    lambda n: (n.parts, None),
    lambda children, _: with_parts(Kept, list(children)),
    serialized_type_name=NAMES + "Kept",
)
pytree.register_pytree_node(
    Copying,
    lambda n: ([n.parts], None),
    lambda children, _: with_parts(Copying, [*next(iter(children))]),
    serialized_type_name=NAMES + "Copying",
)


@pytest.mark.parametrize("kind", [Kept, Copying])
def test_the_list_of_a_node_of_pytree_is_written_to(kind: type[Node]) -> None:
    """What a module appended to the copy was lost if the node had copied its list once more."""
    first, new = torch.ones(1), torch.zeros(1)
    cache = with_parts(kind, [first])
    found, given = copied(cache)
    given.parts.append(new)
    found.carry_back()
    assert cache.parts[0] is first and cache.parts[1] is new and len(cache.parts) == 2


def test_an_attribute_that_a_module_deletes_is_gone() -> None:
    record = Record(torch.ones(1))
    record.extra = "dropped"
    found, given = copied(record)
    del given.extra
    found.carry_back()
    assert vars(record).keys() == {"value", "note"}


def test_items_and_fields_of_one_dict_are_written_to() -> None:
    """A module may change either of what an output of Hugging Face has, and add and remove items."""
    output, new = Output(torch.ones(2), torch.ones(1)), torch.zeros(1)
    output["dropped"] = 1
    found, given = copied(output)
    given["logits"], given["added"], given.hidden = new, 3, "text"
    del given["dropped"]
    found.carry_back()
    assert output == {"logits": new, "added": 3} and output.hidden == "text"


# ---- what cannot be replaced, and what nobody can see ----


@pytest.mark.parametrize(
    ("make_value", "opaque"),
    [
        (lambda t: lambda: t, True),
        (lambda t: (x for x in [t]), True),
        (lambda t: iter([t]), True),
        (lambda t: [{"loss": lambda: t}], True),
        (lambda t: functools.partial(torch.add, t), True),
        (lambda t: torch.nn.functional.relu, False),
        (lambda t: [t, len, int, nn.ReLU()], False),
        (lambda t: Box(len), False),
        (lambda t: {t}, False),
    ],
)
def test_what_nobody_can_see_is_opaque(make_value: Callable[[Tensor], Any], opaque: bool) -> None:
    assert Tree((make_value(torch.ones(1)),), results=True).opaque == opaque


def test_tensors_in_closures_of_results_are_found_and_stay() -> None:
    tensor = torch.ones(1)
    empty: Any
    result = lambda: (tensor, empty)
    found = Tree((result,), results=True)
    assert found.tensors == [tensor]
    found.tensors = [tensor * 2]
    assert found.rebuilt() == [result] and result.__closure__[1].cell_contents is tensor
    assert Tree((result,)).hidden == [] and found.opaque
    empty = None


def test_objects_are_written_to_in_place_on_request() -> None:
    box, tensor = Box({"a": [torch.ones(1)]}), torch.zeros(1)
    found = Tree((box, Pair(tensor, [tensor])), results=True)
    found.tensors = [t + 5 for t in found.tensors]
    assert found.rebuilt(in_place=True)[0] is box and box.value["a"][0].item() == 6.0


def test_large_containers_are_not_searched_for_what_was_left() -> None:
    tensor = torch.ones(1)
    for value, count in (([tensor] * 64, 1), ([tensor] * 65, 0), ([[(tensor,)]], 1), ([[[(tensor,)]]], 0)):
        assert len(Tree((value,), results=True, left=True).tensors) == count


def test_the_outermost_values_that_a_module_may_write_to() -> None:
    inner: dict[str, Any] = {"a": [torch.ones(1)]}
    values = [(inner, 1), Box([torch.ones(1)]), torch.ones(1), {2}]
    assert [id(value) for value in Tree(values).writable] == [id(inner), id(values[1])]
