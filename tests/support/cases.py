"""The models of ``tests.support.models`` by name, as test functions pass them to their workers, and what
``fully_shard`` is told when one of them is sharded. ``assert_case`` trains one as ``tests.support.parity`` does."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from tests.support import api, models
from tests.support.models import Case, Through, children, linears, mlp, rows, tokens
from tests.support.parity import SEED, Program, assert_parity, mesh_of, train
from tests.support.sampling import ALL_VARIABLE
from tests.support.shapes import KINDS, PLAIN_OBJECTS, Wraps

DIRECT = {"direct_param_bytes": 0, "direct_group_bytes": 0, "chunk_bytes": 1}
"""Transfer sizes with which every parameter is gathered in place and every gradient leaves as soon as it is there."""
TRANSFERS: dict[str, dict[str, int]] = {"packed": {}, "direct": DIRECT}


def in_the_middle(middle: type[nn.Module] | object, **options: object) -> Case:
    """A case with ``middle()`` between two linear units."""
    return Case(lambda: Through(middle()), rows(6), children, **options)


def wrapping(kind: str) -> Case:
    """Three units in a row that pass a container of one kind to each other; the root returns it."""
    return Case(
        lambda: nn.Sequential(*(Wraps(kind) for _ in range(3))),
        rows(6),
        children,
        torch_takes_it=kind not in PLAIN_OBJECTS and (api.torch_since("2.12") or "dataclass" not in kind),
    )


CASES: dict[str, Case] = {
    "mlp": Case(lambda: mlp(4, 8, 8, 4), rows(4), linears),
    "mlp_root_only": Case(lambda: mlp(4, 8, 4), rows(4)),
    "mlp_grouped": Case(
        lambda: mlp(4, 8, 8, 8, 4), rows(4), lambda model: [[model[0], model[2]], [model[4], model[6]]]
    ),
    "mlp_input_grad": Case(lambda: mlp(4, 8, 4), rows(4, grad=True), linears),
    "wide": Case(lambda: mlp(64, 512, 512, 64), rows(64), linears),
    "large": Case(lambda: mlp(256, 2100, 1024, 64), rows(256), linears),
    "nested": Case(
        lambda: nn.Sequential(mlp(6, 8, 6), mlp(6, 5, 6)), rows(6), lambda model: [model[0][0], model[0], model[1]]
    ),
    "transformer": Case(models.Transformer, tokens(5, 11), lambda model: list(model.blocks)),
    "transformer_grouped": Case(
        models.Transformer,
        tokens(5, 11),
        lambda model: [*model.blocks, [model.embed, model.norm, model.head]],
    ),
    "uneven": Case(lambda: mlp(3, 5, 17, 3), rows(3), linears),
    "smaller_than_world": Case(lambda: mlp(2, 1, 3, 2), rows(2), linears),
    "no_parameters": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows(4), children),
    "scalars": in_the_middle(lambda: models.Odd(scale=torch.randn(()), one=torch.randn(1)), torch_takes_it=False),
    "three_dims": in_the_middle(lambda: models.Odd(cube=torch.randn(3, 5, 2), row=torch.randn(1, 7))),
    "integer": in_the_middle(
        lambda: models.Odd(index=torch.arange(7), weight=torch.randn(5)), torch_takes_it=api.torch_since("2.12")
    ),
    "channels_last": Case(models.Image, rows(3, 6, 6), children, torch_takes_it=False),
    "non_contiguous": in_the_middle(models.Transposed, torch_takes_it=False),
    "mixed_frozen_dtypes": in_the_middle(
        lambda: models.MixedDtypes(trainable=False), torch_takes_it=api.torch_since("2.12")
    ),
    "mixed_dtypes": in_the_middle(lambda: models.MixedDtypes(trainable=True), torch_takes_it=False, low_precision=True),
    "tied": in_the_middle(models.Tied),
    "used_several_times": Case(models.Recurrent, rows(6), lambda model: [model.cell]),
    "frozen": Case(models.Frozen, rows(6), lambda model: list(model.layers)),
    "frozen_all": Case(lambda: mlp(4, 8, 4).requires_grad_(False), rows(4, grad=True), linears),
    "skipping": Case(models.Skipping, rows(6), children),
    "no_arguments": Case(models.UsesConstant, rows(6), children),
    "returns_its_weights": Case(models.UsesTable, rows(6), children, torch_takes_it=False),
    "view_in_place": Case(models.ViewInPlace, rows(6), children, torch_takes_it=False),
    "keywords": Case(models.Keywords, rows(6), children, keywords=lambda inputs: {"x": inputs[0], "twice": True}),
    "casts_its_inputs": Case(lambda: nn.Sequential(models.Casting(4, 6), models.Casting(6, 4)), rows(4), children),
    "parameter_lists": in_the_middle(models.Listed),
    "lstm": Case(lambda: Through(nn.LSTM(6, 6, batch_first=True)), rows(3, 6), children),
    "buffers": in_the_middle(models.Counting),
    "batch_norm": in_the_middle(lambda: nn.BatchNorm1d(6), rows_couple=True),
    **{f"wrapping_{kind}": wrapping(kind) for kind in KINDS},
}


PARAMETERS = (
    "uneven",
    "smaller_than_world",
    "no_parameters",
    "scalars",
    "three_dims",
    "integer",
    "channels_last",
    "non_contiguous",
    "mixed_frozen_dtypes",
    "mixed_dtypes",
    "tied",
    "frozen",
    "frozen_all",
    "parameter_lists",
    "lstm",
    "buffers",
    "batch_norm",
)
"""The cases with parameters of a kind of their own."""


def parametrize_cases(*names: str) -> Any:
    """Return the mark that runs a test for each named case; those that torch refuses are promised by fsdp2 only."""
    marks = {name: [] if CASES[name].torch_takes_it else [api.fsdp2_only] for name in names}
    return pytest.mark.parametrize("case", [pytest.param(name, marks=marks[name]) for name in names])


@dataclass(frozen=True)
class Setup:
    """What ``fully_shard`` is told, in picklable form.

    ``placement`` is "last" or "first" (dimension) or None for the default. ``transfer`` is a key of ``TRANSFERS``.
    The policy's output_dtype is the root's, and the units' as well if ``units_cast_outputs``.
    """

    reshard_after_forward: bool | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    placement: str | None = None
    transfer: str = "packed"
    units_cast_outputs: bool = False

    def arguments(self, root: bool) -> dict[str, Any]:
        """Return the keyword arguments of ``fully_shard``, the mesh excepted."""
        policy = self.policy if root or self.units_cast_outputs else replace(self.policy, output_dtype=None)
        placements = {"last": lambda p: Shard(max(p.ndim - 1, 0)), "first": lambda p: Shard(0), None: None}
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": policy,
            "shard_placement_fn": placements[self.placement],
        }

    @property
    def low_precision(self) -> bool:
        """Whether anything is computed or sent in fewer bits than fp32."""
        return self.policy.param_dtype is not None or self.policy.reduce_dtype is not None


def build(case: Case) -> nn.Module:
    """Return the case's model, equal on every call."""
    torch.manual_seed(SEED)
    return case.build()


def shard(module: nn.Module, case: Case, implementation: ModuleType, mesh: DeviceMesh, setup: Setup) -> Any:
    """Shard the units and then the root in place and return the root."""
    for unit in [*case.units(module), module]:
        implementation.fully_shard(unit, mesh=mesh, **setup.arguments(root=unit is module))
    if implementation is api.ours and api.name == "fsdp2":
        module.set_transfer_sizes(**TRANSFERS[setup.transfer])
    return module


def build_sharded(name: str, world: int, setup: Setup | None = None) -> Any:
    """Return the named case's model, sharded by ours."""
    return shard(build(CASES[name]), CASES[name], api.ours, mesh_of(world), setup or Setup())


def chunk(tensor: Tensor, dim: int, rank: int, world: int) -> Tensor:
    """Return the piece of a whole tensor that a rank should have."""
    pieces = tensor.chunk(world, dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)


def assert_case(
    case: str | Case,
    setup: Setup | None = None,
    program: Program = train,
    against: Iterable[str] = ("torch", "alone"),
) -> None:
    """Assert that a program on a case, or the named one, shows what torch's fully_shard shows, if that takes it, and
    what a single process shows, if its batch can be whole.

    The sizes of transfers take turns among the setups; with --all each one has both.
    """
    setup, name = setup or Setup(), case if isinstance(case, str) else case.build.__qualname__
    case = CASES[case] if isinstance(case, str) else case
    against = [other for other in against if (case.torch_takes_it if other == "torch" else not case.rows_couple)]
    low = setup.low_precision or case.low_precision
    turn = zlib.crc32(f"{name} {setup} {program.__name__}".encode()) % len(TRANSFERS)
    for transfer in TRANSFERS if os.environ.get(ALL_VARIABLE) else [[*TRANSFERS][turn]]:
        mine = replace(setup, transfer=transfer)
        run = assert_parity(
            lambda module, fsdp, mine=mine: shard(module, case, fsdp, mesh_of(dist.get_world_size()), mine),
            build=case,
            program=program,
            policy=setup.policy,
            against=against,
            tolerance=0.05 if low else 2e-5,
        )
        assert all(isinstance(parameter, DTensor) for parameter in run.module.parameters())
