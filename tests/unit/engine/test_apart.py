"""While Dynamo compiles, each full parameter has a storage of its own; nothing else about it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

import fsdp2
from tests.support.fake import fake_mesh

Looked = list[tuple[int, int, int, list[float]]]


@contextmanager
def unsharded() -> Iterator[Any]:
    """Yield a unit that one rank has unsharded."""
    with fake_mesh(1) as mesh:
        model = fsdp2.fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), mesh=mesh)
        model.unshard()
        yield model


def look(model: nn.Module) -> Looked:
    """Return of each parameter its storage, address, version and values."""
    return [(p.untyped_storage()._cdata, p.data_ptr(), p._version, p.flatten().tolist()) for p in model.parameters()]


def compile_with(backend: Callable[..., Any]) -> None:
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))


def test_storages_differ_while_dynamo_compiles() -> None:
    with unsharded() as model:
        before, meanwhile = look(model), []

        def backend(graph: Any, inputs: Any) -> Any:
            meanwhile.extend(look(model))
            return graph.forward

        compile_with(backend)
        assert len({storage for storage, *_ in before}) == 1
        assert len({storage for storage, *_ in meanwhile}) == 4
        assert [rest for _, *rest in meanwhile] == [rest for _, *rest in before]
        assert look(model) == before


def test_an_error_of_the_compiler_ends_it() -> None:
    with unsharded() as model:
        before = look(model)

        def backend(graph: Any, inputs: Any) -> Any:
            raise ValueError("a backend that fails")

        with pytest.raises(Exception, match="a backend that fails"):
            compile_with(backend)
        assert look(model) == before


def test_the_next_forward_ends_what_an_interrupt_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the parameters would still have the address of memory that has been freed."""
    with unsharded() as model:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(callback_handler, "end_callbacks", [])
            compile_with(lambda graph, inputs: graph.forward)
        assert len({storage for storage, *_ in look(model)}) == 4
        model.reshard()
        model(torch.ones(1, 3)).sum().backward()
        model.unshard()
        assert len({storage for storage, *_ in look(model)}) == 1
        fresh = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        fresh.load_state_dict({name: value.to_local() for name, value in model.state_dict().items()})
        assert model(torch.ones(1, 3)).equal(fresh(torch.ones(1, 3)))
