"""Objects that are alive."""

from __future__ import annotations

import gc

from fsdp2.engine.registry import Registry


class Item:
    """Something that can be referenced weakly."""


def test_one_may_be_added_while_another_thread_looks() -> None:
    """Threads that make models beside each other met "Set changed size during iteration"."""
    registry, items = Registry[Item](), [Item() for _ in range(4)]
    registry.add(items[0])
    for number, _ in enumerate(registry, 1):
        registry.add(items[number])
    assert list(registry) == items[:2]


def test_what_is_freed_or_discarded_is_not_there() -> None:
    registry, items = Registry[Item](), [Item(), Item(), Item()]
    for item in items:
        registry.add(item)
    registry.discard(items[0])
    registry.discard(items[0])
    del items[1], item
    gc.collect()
    assert list(registry) == [items[1]] and len(registry) == 1
