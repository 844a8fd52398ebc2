"""``use_local_shards(elementwise=True)``: optimizers that are not torch's own step on stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.optim.stepping import assert_same_training, batch, pair, train
from tests.support.pool import on_ranks

# ---- optimizers that are not torch's ----


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a running mean, with state in several shapes and a count in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, fail: bool = False) -> None:
        super().__init__(params, {"lr": lr, "fail": fail})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.saw = type(parameter), type(parameter.grad)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["means"] = [torch.zeros_like(parameter), {"slow": torch.zeros_like(parameter)}]
                state["step"] += 1
                state["last"] = parameter.grad.sign()
                fast, slow = state["means"][0], state["means"][1]["slow"]
                fast.lerp_(parameter.grad, 0.5)
                slow.lerp_(fast, 0.1)
                parameter.add_((fast + slow).sign(), alpha=-group["lr"])
                if group["fail"] and state["step"] > 1:
                    raise FloatingPointError("as asked")
        self.state["global"] = "kept"
        return loss


@on_ranks(1, 2, 4)
def test_other_classes_that_are_elementwise(rank, world):
    """They find plain tensors while they step, and a closure that the step calls finds what there always was."""
    modules, optimizers = pair(Signs, elementwise=True)
    for module, optimizer in zip(modules, optimizers, strict=True):

        def closure(module=module, optimizer=optimizer) -> Tensor:
            assert type(optimizer.param_groups[0]["params"][0]) is DTensor
            optimizer.zero_grad()
            loss = module(batch(0), rare=True).square().mean()
            loss.backward()
            return loss

        train(module, optimizer, range(2))
        optimizer.step(closure)
    assert_same_training(modules, optimizers)
    assert optimizers[1].saw == (nn.Parameter, Tensor)
    assert all(parameter.grad is not None for parameter in modules[1].parameters() if parameter.requires_grad)
    assert {type(key) for key in optimizers[1].state} == {DTensor, str}


@on_ranks(2)
def test_an_optimizer_that_raises_has_its_dtensors_back(rank, world):
    """The next step goes on as if nothing was lent."""
    modules, optimizers = pair(lambda params: Signs(params, fail=True), elementwise=True)
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer, [0])
        module(batch(1)).square().mean().backward()
        with pytest.raises(FloatingPointError, match="as asked"):
            optimizer.step()
        assert type(optimizer.param_groups[0]["params"][0]) is DTensor
        optimizer.param_groups[0]["fail"] = False
        optimizer.zero_grad()
        train(module, optimizer, [2])
    assert_same_training(modules, optimizers)
