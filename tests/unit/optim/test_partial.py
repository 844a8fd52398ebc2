"""Steps over some parameters at a time."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from fsdp2.optim.partial import PartialGroups


class Interrupting(dict[str, Any]):
    """A parameter group at whose change Ctrl-C comes."""

    def update(self, *unused: object, **more: object) -> NoReturn:
        raise KeyboardInterrupt


def test_an_interrupt_while_tensors_are_lent():
    """Ctrl-C between two groups left the first one with what was lent: the optimizer never stepped on the model again,
    silently."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    lent = {param: (torch.zeros(2),) for param in params}
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=1.0)
    optimizer.param_groups[1] = Interrupting(optimizer.param_groups[1])
    kept, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(KeyboardInterrupt), PartialGroups(optimizer).only(lent, {}):
        pass
    assert optimizer.state is kept and optimizer.param_groups is groups
    assert [group["params"][0] is param for group, param in zip(groups, params)] == [True, True]
