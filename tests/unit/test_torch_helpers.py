"""What fsdp2 leans on of torch's wrap policies and loss scaling still means what fsdp2 takes it to mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import probes


@probes("run_policy")
def test_policies_answer_with_modules_and_their_arguments() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
    by_class, own = ModuleWrapPolicy({nn.Linear, nn.Sequential}), {module[0]: True, module[2]: {"a": 1}}
    assert _torch.run_policy(by_class, module, {module[1]}) == {module: {}, module[0]: {}}
    by_answer = CustomPolicy(lambda part: own.get(part, False))
    assert _torch.run_policy(by_answer, module, set()) == {module[0]: {}, module[2]: {"a": 1}}
    assert _torch.run_policy(always_wrap_policy, module, set()) is None


@probes("check_finite_and_unscale")
def test_gradients_are_unscaled_and_looked_through() -> None:
    found, inverse = torch.zeros(()), torch.tensor(0.5)
    grads = [torch.tensor([2.0, 4.0]), torch.zeros(0), torch.ones(2, 2)]
    _torch.check_finite_and_unscale(grads, found, inverse)
    assert found == 0 and grads[0].tolist() == [1.0, 2.0] and grads[2].sum() == 2
    _torch.check_finite_and_unscale([torch.tensor([1.0, float("nan")])], found, inverse)
    assert found == 1
    _torch.check_finite_and_unscale(grads, found, inverse)
    assert found == 1
