"""Rules from names of the model to names of the engine: what they make, and which are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.sharding.boxes import Box, narrow, numel, whole
from fsdp2.weights.buckets import Entry
from fsdp2.weights.updates.mapping import Target, checked_dtypes, checked_names, targets_of

TENSORS = [
    (("a.q",), Entry((4, 3), torch.float32)),
    (("a.k",), Entry((2, 3), torch.float32)),
    (("b.q", "tied"), Entry((4, 3), torch.float32)),
    (("b.k",), Entry((2, 3), torch.float32)),
    (("stack",), Entry((2, 5, 3), torch.float32)),
    (("scale",), Entry((), torch.float32)),
    (("count",), Entry((), torch.int64)),
]


def made(mapping: object, dtype: object = None) -> dict[str, Target]:
    """Return the targets by name."""
    rules, dtypes = checked_names("W", mapping), checked_dtypes("W", dtype)
    return {target.name: target for target in targets_of("W", TENSORS, rules, dtypes)}


def test_without_rules() -> None:
    """Names and dtypes of the model."""
    assert [(name, target.entry) for name, target in made(None).items()] == [(n[0], e) for n, e in TENSORS]


def test_the_first_rule_counts() -> None:
    """A later one would fit, too."""
    names = made({"a.q": "x", "*.q": "y.*", "*.k": None, "tied": "other", "s*": "t*"})
    assert list(names) == ["x", "y.b", "other", "ttack", "tcale", "count"]


def test_a_rule_for_a_tensor_that_a_later_one_joins() -> None:
    """It is sent by both, whichever of the joined tensors comes first; by the first rule it was left out otherwise."""
    for name in ("a.q", "a.k"):
        names = made({name: "alone", ("*.q", "*.k"): "*.qk"})
        assert set(names) == {"alone", "a.qk", "b.qk", "stack", "scale", "count"}


def test_stars() -> None:
    """Each stands for what that of the model's name stands for, in their order."""
    assert list(made({"*.*": "*-*.w"}))[:4] == ["a-q.w", "a-k.w", "b-q.w", "b-k.w"]


def test_dtypes() -> None:
    """By the engine's names; the first that fits counts; integers keep theirs."""
    targets = made({"scale": "norm.scale"}, {"norm.*": torch.float32, "*.q": torch.float16, "*": torch.bfloat16})
    found = {name: target.entry.dtype for name, target in targets.items()}
    assert found["norm.scale"] == torch.float32 and found["b.q"] == torch.float16 and found["b.k"] == torch.bfloat16
    assert found["count"] == torch.int64
    assert made(None, torch.float8_e4m3fn)["a.q"].entry.dtype == torch.float8_e4m3fn
    assert made({"a.q": "[q]"}, {"[q]": torch.float16})["[q]"].entry.dtype == torch.float16  # its brackets are a name's


@pytest.mark.parametrize(
    ("mapping", "dtype", "kind", "text"),
    [
        ([("a", "b")], None, TypeError, "mapping must be a mapping .* or a function of a name, got list"),
        ({1: "x"}, None, TypeError, "got the rule 1: 'x', expected a name or a tuple of names"),
        ({"a.q": ()}, None, TypeError, r"got the rule 'a.q': \(\), expected a name"),
        ({"a.q": (("x", 0),)}, None, TypeError, "expected a name"),
        ({("a.q", "a.k"): ("x", "y")}, None, ValueError, "joins 2 tensors, expected one name for them"),
        ({("a.q", "a.k"): (("x", 6),)}, None, ValueError, "joins 2 tensors, expected one name for them"),
        ({("a.q", "a.k"): "x{}"}, None, ValueError, "numbers the tensors of a stack"),
        ({"stack": ("x{}", "y")}, None, ValueError, r"numbers .*, and \{\} in each of the engine's"),
        ({"stack": ("x{}", "y{}")}, None, ValueError, r"stack is to be split into 2 equal parts; .*that 2 divides"),
        ({"*.q": "q"}, None, ValueError, r"has \[0, 1\] stars in its names, expected as many in each"),
        ({"a.q": (("x", 1), "y")}, None, ValueError, "has rows for some parts; expected them for all or none"),
        ({"c.q": "x"}, None, ValueError, "the mapping has 'c.q', which is no name of the model's and fits none"),
        ({"*.q": "*.x", "a.q": "y"}, None, ValueError, "has 'a.q', .* that no earlier rule fits"),
        ({("*.q", "*.v"): "*.x"}, None, ValueError, r"a.x is to be joined of \['a.q', 'a.v'\], .* no \['a.v'\]"),
        ({("a.q", "stack"): "x"}, None, ValueError, "expected one dtype, and shapes that differ in the first"),
        ({("scale", "count"): "x"}, None, ValueError, "expected one dtype, and shapes"),
        (
            {"a.q": ("x", "y", "z")},
            None,
            ValueError,
            r"a.q is to be split into 3 equal parts; .*expected a number of rows that 3",
        ),
        ({"scale": ("x", "y")}, None, ValueError, "scale is to be split into"),
        ({"scale": "x.{}"}, None, ValueError, "scale is to be taken apart into .*, of two dimensions or more"),
        ({"a.q": "b.q"}, None, ValueError, "gives the name b.q to two tensors; got a.q and b.q"),
        ({"*": None}, None, ValueError, "the mapping leaves out every tensor"),
        (lambda name: None, None, ValueError, "the mapping leaves out every tensor"),
        (lambda name: 1, None, TypeError, "mapping returned 1 for a.q"),
        (None, {"x*": torch.bfloat16}, ValueError, r"dtype has 'x\*', which is no name of the engine's"),
        (None, {"a.q": None}, TypeError, "dtype must be a floating-point torch.dtype, or a mapping"),
        (None, torch.int8, TypeError, "dtype must be a floating-point torch.dtype"),
    ],
)
def test_refused(mapping: object, dtype: object, kind: type[Exception], text: str) -> None:
    """Wrong rules, and rules that do not fit the model: a rule without effect would be a mistake that nobody sees."""
    with pytest.raises(kind, match=text):
        made(mapping, dtype)


RULES = {
    ("*.q", "*.k"): "*.qk",
    "stack": "stack.{}",
    "s*": "s.*",
}
SPLIT = {"*.q": (("*.0", 3), ("*.1", 1)), "*.k": ("*.2", "*.3"), "stack": (("stack.{}.0", 2), ("stack.{}.1", 3))}


def test_entries_of_a_stack_that_are_split() -> None:
    """Both names of an expert have its number, and the entries' shapes are those of the parts."""
    found = {name: target.entry.shape for name, target in made(SPLIT).items() if name.startswith("stack")}
    assert found == {"stack.0.0": (2, 3), "stack.0.1": (3, 3), "stack.1.0": (2, 3), "stack.1.1": (3, 3)}


@given(st.data(), st.sampled_from([RULES, SPLIT]))
def test_boxes_of_sources_are_boxes_of_targets(data: st.DataObject, rules: dict[object, object]) -> None:
    """Whatever boxes sources are cut into, each element of a target is written once, with the right value."""
    values = [torch.randn(entry.shape) for _, entry in TENSORS]
    for target in made(rules).values():
        got, times = torch.zeros(target.entry.shape), torch.zeros(target.entry.shape)
        for rows in target.rows:
            for box in cuts(data, TENSORS[rows.source][1].shape):
                common = target.common(rows, box)
                if common is not None:
                    read = narrow(values[rows.source], common[0])
                    assert read.numel() == numel(common[1])
                    narrow(got, common[1]).copy_(read.reshape([length for _, length in common[1]]))
                    narrow(times, common[1]).add_(1)
        assert (times == 1).all()
        sources = [(values[rows.source], rows) for rows in target.rows]
        parts = [source[rows.start : rows.start + rows.count] if source.ndim else source for source, rows in sources]
        parts = [part if rows.part is None else part.narrow(1, *rows.part) for part, (_, rows) in zip(parts, sources)]
        want = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert torch.equal(got, want.view(target.entry.shape))


def cuts(data: st.DataObject, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes that together are a tensor of ``shape``, cut once along one dimension."""
    if not shape:
        return [()]
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dim]))
    box = whole(shape)
    return [(*box[:dim], piece, *box[dim + 1 :]) for piece in ((0, at), (at, shape[dim] - at))]
