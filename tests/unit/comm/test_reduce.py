"""Reducing on simulated ranks: every rank gets its piece of the mean, and nothing that is the user's is touched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp2.comm import reduce
from fsdp2.comm.reduce import Encoding, ReducePlan, pack_gradients, reduce_chunk
from fsdp2.comm.reductions import Reductions
from fsdp2.comm.retained import Retained
from fsdp2.comm.scaling import choose_scaling
from fsdp2.comm.streams import Lanes
from fsdp2.compression.formats import BlockFormat, Noise
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.packing import RowPlan
from tests.support.streams import Device
from tests.unit.comm.ranks import Message, axes, sent, simulated
from tests.unit.strategies import chunk, dense_strides, layouts

MEMORY = Retained(Lanes(torch.device("cpu")))
DTYPES = [  # of gradients, of the reduction, of the result
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float16, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float64, torch.float64, torch.float64),
]
FP32 = (torch.float32,) * 3
INT8 = BlockFormat(torch.int8, 16)


@dataclass
class Chunk:
    """One chunk on every rank of a (replicate, shard) mesh: plans, and what each rank was delivered."""

    layouts: list[ShardLayout]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = FP32
    replicas: int = 1
    factor: float | None = None
    force_sum: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    pad_to: int = 1

    def __post_init__(self) -> None:
        self.ranks = self.layouts[0].ranks
        self.row = RowPlan(self.layouts, self.pad_to)
        scaling = choose_scaling(
            self.dtypes[1], self.ranks, self.replicas, factor=self.factor, force_sum=self.force_sum
        )
        shards = [axes(self.ranks) for _ in range(self.replicas)]
        replicates = [axes(self.replicas) for _ in range(self.ranks)]
        self.plans = [
            ReducePlan(shards[i][j], replicates[j][i], self.dtypes[1], self.dtypes[2], scaling, **self.options)
            for i in range(self.replicas)
            for j in range(self.ranks)
        ]
        self.delivered: list[list[Tensor]] = [[] for _ in self.plans]

    def start(
        self,
        grads: list[list[Tensor]],
        defer_or_reduce: Callable[[int], Callable[..., bool]] | None = None,
        finished: Any = "last",
    ) -> list[Generator[None, None, None]]:
        """Return the operations of all ranks, not started; the lists of gradients are theirs."""
        return [
            reduce_chunk(
                g,
                self.row,
                p,
                MEMORY,
                d.extend,
                defer_or_reduce(i) if defer_or_reduce else None,
                finished=finished,
            )
            for i, (g, p, d) in enumerate(zip(grads, self.plans, self.delivered))
        ]

    def run(self, grads: list[list[Tensor]], *, exchange: bool = False, **options: Any) -> list[list[Tensor]]:
        """Reduce and return what each rank was delivered."""
        with simulated(exchange=exchange):
            drive(self.start([list(own) for own in grads], **options))
        return self.delivered

    def sent(self, rank: int = 0) -> Message:
        """Return the first message of a rank on its shard axis."""
        return sent(self.plans[rank].shard)[0]


def drive(operations: list[Generator[None, None, None]]) -> int:
    """Carry operations on in turn until all have ended, and return how often each waited."""
    waits = 0
    while operations:
        operations = [operation for operation in operations if next(operation, "ended") is None]
        waits += bool(operations)
    return waits


def gradients(made: Chunk, seed: int = 0, contiguous: bool = False) -> list[list[Tensor]]:
    """Return whole numbers that every dtype can sum, for every rank, in the layouts' strides or contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def one(layout: ShardLayout) -> Tensor:
        values = torch.randint(-8, 9, (layout.numel,), generator=generator).to(made.dtypes[0])
        return values.view(layout.shape) if contiguous else values.as_strided(layout.shape, layout.stride)

    return [[one(layout) for layout in made.layouts] for _ in made.plans]


def assert_means(made: Chunk, grads: list[list[Tensor]]) -> None:
    """Assert that every rank was delivered its pieces of the sums over all ranks, divided."""
    divisor = len(grads) if made.factor is None else made.factor
    for i, layout in enumerate(made.layouts):
        total = torch.stack([own[i].double() for own in grads]).sum(0) / divisor
        for rank, pieces in enumerate(made.delivered):
            piece, expected = pieces[i], chunk(total, layout, rank % made.ranks)
            assert piece.dtype == made.dtypes[2] and piece.shape == expected.shape
            assert piece.stride() == layout.shard_stride(rank % made.ranks)
            assert torch.allclose(piece.double(), expected, rtol=2 * torch.finfo(made.dtypes[1]).eps + 2**-7, atol=0)


def assert_reduced(
    made: Chunk, grads: list[list[Tensor]] | None = None, *, exchange: bool = False
) -> list[list[Tensor]]:
    """Reduce ``grads``, or whole numbers, assert that every rank gets its means, and return the gradients."""
    grads = gradients(made) if grads is None else grads
    made.run(grads, exchange=exchange)
    assert_means(made, grads)
    return grads


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """Up to three gradients, one of them with elements, on up to 4x2 ranks."""
    ranks = draw(st.integers(1, 4))
    some = [draw(layouts(ranks=ranks, nonempty=True))]
    some += draw(st.lists(layouts(ranks=ranks), max_size=2))
    return Chunk(
        draw(st.permutations(some)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([None, 3.0, 0.5])),
        draw(st.booleans()),
        pad_to=draw(st.sampled_from([1, 4, 8])),
    )


@settings(max_examples=100)
@given(chunks(), st.booleans(), st.booleans())
def test_every_rank_gets_its_piece_of_the_mean(made: Chunk, contiguous: bool, exchange: bool) -> None:
    """The user's gradients are not changed, and what was delivered is no part of one."""
    grads = gradients(made, contiguous=contiguous)
    before = [[grad.clone() for grad in own] for own in grads]
    assert_reduced(made, grads, exchange=exchange)
    assert all(torch.equal(a, b) for own, kept in zip(grads, before) for a, b in zip(own, kept))
    held = {grad.untyped_storage().data_ptr() for own in grads for grad in own}
    assert not held & {piece.untyped_storage().data_ptr() for own in made.delivered for piece in own if piece.numel()}


# ---- packing ----


@settings(max_examples=50)
@given(chunks(), st.booleans(), st.booleans())
def test_a_row_holds_every_piece_and_its_padding_is_zero(made: Chunk, contiguous: bool, mixed: bool) -> None:
    grads, row = gradients(made, contiguous=contiguous)[0], made.row
    if mixed:  # a norm's gradient may come in a wider dtype than others
        grads[::2] = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads[::2]]
    rows = torch.full((made.ranks * row.numel,), float("nan"), dtype=made.dtypes[1])
    pack_gradients(grads, row, rows)
    table = rows.view(made.ranks, row.numel)
    for grad, layout, start in zip(grads, made.layouts, row.offsets):
        for rank in range(made.ranks):
            slot, numel = table[rank, start : start + layout.slot_numel], layout.shard_numel(rank)
            piece = slot[:numel].as_strided(layout.shard_shape(rank), layout.shard_stride(rank))
            assert torch.equal(piece.double(), chunk(grad, layout, rank).double())
            assert not slot[numel:].any()
    assert row.numel % made.pad_to == 0 and not table[:, row.numel - row.padding :].any()


def weight(rows: int, columns: int = 4, ranks: int = 2, order: tuple[int, int] = (0, 1), dim: int = 0) -> ShardLayout:
    """Return the layout of a matrix."""
    return ShardLayout((rows, columns), dense_strides((rows, columns), order), dim, ranks)


@pytest.mark.parametrize("layout", [weight(8), weight(4, 8, order=(1, 0), dim=1)], ids=["rows", "columns"])
@pytest.mark.parametrize("exchange", [False, True])
def test_a_single_even_gradient_is_sent_as_it_is(layout: ShardLayout, exchange: bool) -> None:
    made = Chunk([layout])
    grads = assert_reduced(made, exchange=exchange)
    assert made.sent().sent.data_ptr() == grads[0][0].data_ptr()


@pytest.mark.parametrize("layout", [weight(7), weight(8, dim=1), weight(8, order=(1, 0))], ids=str)
def test_other_gradients_are_packed(layout: ShardLayout) -> None:
    made = Chunk([layout])
    grads = assert_reduced(made)
    assert made.sent().sent.untyped_storage().data_ptr() != grads[0][0].untyped_storage().data_ptr()


@pytest.mark.parametrize("dtypes", [FP32, DTYPES[2]], ids=["as they are", "cast"])
@pytest.mark.parametrize("finished", ["early", "last", "together"])
def test_large_gradients_and_the_packed_rest_are_one_chunk(dtypes: tuple[torch.dtype, ...], finished: str) -> None:
    """A large gradient is sent from where it lies, unless it is cast, and small and odd ones behind it in one row."""
    made = Chunk([weight(3), weight(8), weight(6, dim=1), weight(16)], dtypes)
    made.row = RowPlan(made.layouts, 4, (1, 3))
    grads = gradients(made)
    made.run(grads, finished=finished)
    assert_means(made, grads)
    messages = sent(made.plans[0].shard)
    assert len(messages) == 3
    lie = [message.sent.data_ptr() == grads[0][i].data_ptr() for message, i in zip(messages, (1, 3))]
    assert lie == [dtypes is FP32] * 2


def test_a_gradient_that_lies_otherwise_is_copied_before_it_is_sent() -> None:
    """Ranks may have gradients of other strides than the weight's; their collectives are the same."""
    made = Chunk([weight(8), weight(8)])
    made.row = RowPlan(made.layouts, 4, (0, 1))
    grads = gradients(made)
    for own in grads:
        own[0] = own[0].t().contiguous().t()
    assert_reduced(made, grads)


def test_half_precision_is_divided_before_the_sum_in_memory_of_its_own() -> None:
    made = Chunk([weight(8)], (torch.float16, torch.float16, torch.float32))
    grads = [[torch.full((8, 4), 60000.0, dtype=torch.float16)] for _ in range(2)]
    made.run(grads)
    assert torch.equal(made.delivered[0][0], torch.full((4, 4), 60000.0))
    assert torch.equal(grads[0][0], torch.full((8, 4), 60000.0, dtype=torch.float16))


@pytest.mark.parametrize(
    ("gradient", "reduce", "values", "mean"),
    [
        (torch.bfloat16, torch.bfloat16, (256.0, 1.0), 128.5),  # 256 + 1 is 256 in bfloat16
        (torch.float32, torch.bfloat16, (2.0, 4.0), 3.0),
        (torch.float32, torch.float64, (1.0, *[2.0**-24] * 3), (1 + 3 * 2.0**-24) / 4),
    ],
)
def test_an_exchange_sends_in_the_reduce_dtype_and_sums_in_float32_at_least(
    gradient: torch.dtype, reduce: torch.dtype, values: tuple[float, ...], mean: float
) -> None:
    made = Chunk([weight(8, ranks=len(values))], (gradient, reduce, torch.float32))
    made.run([[torch.full((8, 4), value, dtype=gradient)] for value in values], exchange=True)
    assert made.sent().sent.dtype is reduce
    assert torch.equal(made.delivered[0][0], torch.full((8 // len(values), 4), mean))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_an_exchange_of_complex_numbers_keeps_both_parts() -> None:
    """One of four bytes is no float32."""
    made = Chunk([weight(8)], (torch.complex32,) * 3)
    made.run([[torch.full((8, 4), value, dtype=torch.complex32)] for value in (2 + 1j, 4 - 3j)], exchange=True)
    assert made.delivered[0][0].tolist() == [[3 - 1j] * 4] * 4


def test_a_single_gradient_is_sent_with_the_padding_of_its_row() -> None:
    """It was sent without, and NCCL refuses an input that is not the output's size times the ranks."""
    made = Chunk([weight(14, columns=1)], pad_to=4)
    assert_reduced(made)
    assert made.sent().sent.numel() == 2 * made.sent().output.numel() == 16


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("padded", [False, True])
def test_the_copies_that_pack_do_not_grow_with_the_ranks(ranks: int, padded: bool, monkeypatch) -> None:
    """One kernel packs what is cut along the slowest dimension; any other parameter takes one copy, two if uneven."""
    copied: list[int] = []
    monkeypatch.setattr("fsdp2.comm.pieces.foreach_copy", lambda targets, sources: copied.append(len(targets)))
    rows = [weight(ranks + 1, columns=3, ranks=ranks), weight(2 * ranks, columns=3, ranks=ranks)]
    columns = [weight(3, columns=2 * ranks, ranks=ranks, dim=1), weight(3, columns=2 * ranks + 1, ranks=ranks, dim=1)]
    for some, most in ((rows, 0), (columns, 3)):
        row, copied[:] = RowPlan(some, 16 if padded else 1), []
        assert bool(row.padding) == padded
        pack_gradients([torch.ones(layout.shape) for layout in some], row, torch.empty(ranks * row.numel))
        assert sum(copied) <= most


# ---- waiting, memory ----


def test_a_chunk_waits_once_per_axis() -> None:
    """Where there are streams it waits for the host too; on a CPU gradients are there already."""

    def waits(replicas: int, **options: Any) -> int:
        made = Chunk([weight(8)], replicas=replicas, options=options)
        with simulated():
            return drive(made.start(gradients(made)))

    assert (waits(1), waits(2)) == (1, 2)
    assert (waits(1, offload=True), waits(2, offload=True)) == (1, 2)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("layout", [weight(8), weight(7)], ids=["as it is", "packed"])
def test_what_was_sent_and_received_is_freed_before_the_next_wait(layout: ShardLayout, exchange: bool) -> None:
    made = Chunk([layout], replicas=2)
    with simulated(exchange=exchange):
        operations = made.start(gradients(made))
        for operation in operations:
            next(operation)
        messages = [message for plan in made.plans for message in sent(plan.shard)]
        refs = [StorageWeakRef(message.sent.untyped_storage()) for message in messages]
        refs += [StorageWeakRef(message.output.untyped_storage()) for message in messages if exchange]
        del messages
        for operation in operations:
            next(operation)  # to the wait for the replicate axis
        for plan in made.plans:
            sent(plan.shard).clear()
        assert all(ref.expired() for ref in refs)
        drive(operations)


def test_gradients_leave_the_callers_list() -> None:
    made = Chunk([weight(8), weight(3)])
    grads = gradients(made)
    with simulated():
        operations = made.start(grads)
        for operation in operations:
            next(operation)
        assert grads == [[], []]
        drive(operations)


# ---- the replicate axis, hooks, memory of the user's ----


def test_sums_that_are_kept_go_no_further_until_they_are_settled() -> None:
    """Two backwards, the first without an all-reduce: its sums join those of the second."""
    made = Chunk([weight(8), weight(3)], replicas=2)
    first, second = gradients(made, seed=1), gradients(made, seed=2)
    kept: list[list[Tensor]] = [[] for _ in made.plans]

    def keep(rank: int) -> Callable[..., bool]:
        def defer_or_reduce(slots: list[Tensor]) -> bool:
            kept[rank] = slots
            return False

        return defer_or_reduce

    def join(rank: int) -> Callable[..., bool]:
        def defer_or_reduce(slots: list[Tensor]) -> bool:
            for slot, earlier in zip(slots, kept[rank]):
                slot += earlier
            return True

        return defer_or_reduce

    made.run(first, defer_or_reduce=keep)
    assert made.delivered == [[]] * 4
    assert [len(sent(plan.replicate)) for plan in made.plans] == [0] * 4
    made.run(second, defer_or_reduce=join)
    assert_means(made, [[a + b for a, b in zip(*pair)] for pair in zip(first, second)])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_sees_each_reduced_chunk_before_division_and_cast(replicas: int) -> None:
    seen: list[Tensor] = []

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(10)

    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    made = Chunk([weight(8)], dtypes, replicas, factor=3.0, options={"hook": hook})
    made.run([[torch.full((8, 4), 6.0, dtype=torch.bfloat16)] for _ in made.plans])
    assert len(seen) == len(made.plans)
    assert all(torch.equal(one, torch.full((16,), 12.0 * replicas)) for one in seen)
    assert torch.equal(made.delivered[0][0], torch.full((4, 4), 40.0 * replicas, dtype=torch.bfloat16))


class Arena:
    """A reduce-scatter of the user's own whose buffers are parts of one allocation, behind ``skip`` elements."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.allocated: list[tuple[int, torch.dtype]] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory."""
        numel = torch.Size(size).numel()
        self.allocated.append((numel, dtype))
        return torch.full((numel + self.skip,), -1.0, dtype=dtype)[self.skip :].view(size)


@pytest.mark.parametrize(
    ("cuts", "dtypes", "numel"),
    [([weight(8)], DTYPES[2], 32), ([weight(8)], DTYPES[4], 32), ([weight(8), weight(3)], FP32, 48)],
    ids=["cast", "divided", "packed"],
)
def test_a_custom_collective_gets_memory_that_it_allocated(
    cuts: list[ShardLayout], dtypes: tuple[torch.dtype, ...], numel: int
) -> None:
    """It may be part of something larger. Half precision is divided there, before it is sent."""
    arena = Arena(skip=16)
    made = Chunk(cuts, dtypes, options={"custom": arena})
    assert_reduced(made, exchange=True)
    assert arena.allocated == [(numel, dtypes[1]), (numel // 2, dtypes[1])] * 2
    assert made.sent().kind == "reduce_scatter"


# ---- defects there were ----


@pytest.mark.parametrize("count", [1, 2])
def test_a_chunk_of_empty_gradients_is_delivered(count: int) -> None:
    made = Chunk([weight(0)] * count)
    made.run(gradients(made))
    assert [[tuple(piece.shape) for piece in own] for own in made.delivered] == [[(0, 4)] * count] * 2


def test_gradients_of_two_dtypes_are_packed() -> None:
    """One was kept by a backward without reduction (so in the reduce dtype), the other was unused in it."""
    made = Chunk([weight(8), weight(4)], FP32)
    grads = [[first, second.bfloat16()] for first, second in gradients(made)]
    assert_reduced(made, grads)


def test_ranks_agree_on_the_wire_whatever_they_kept() -> None:
    """Rank 0 kept a gradient (in the reduce dtype) where rank 1 did not use the parameter: gloo aborts the process."""
    made = Chunk([weight(8)], (torch.bfloat16, torch.float32, torch.float32))
    grads = gradients(made)
    grads[0] = [grad.float() for grad in grads[0]]
    assert_reduced(made, grads, exchange=True)


@settings(max_examples=60)
@given(
    st.integers(2, 4).flatmap(lambda ranks: st.lists(layouts(ranks=ranks, nonempty=True), min_size=1, max_size=3)),
    st.integers(1, 3),
    st.sampled_from([(INT8, None), (INT8, INT8), (None, INT8)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_encoded_gradients_become_means_within_a_step(cuts, replicas, formats, by_chance, dtype) -> None:
    """Each encoding is off by a step of the largest at most; copies on the replicate axis are equal bit by bit."""
    ranks = cuts[0].ranks
    shard, replica = (
        form and Encoding(replace(form, stochastic=by_chance), Noise(i)) for i, form in enumerate(formats)
    )
    options = {"encodings": (shard, replica if replicas > 1 else None)}
    made = Chunk(cuts, (dtype, torch.float32, torch.float32), replicas, pad_to=16 * replicas, options=options)
    grads = gradients(made)
    made.run(grads)
    for i, layout in enumerate(cuts):
        total = torch.stack([own[i].double() for own in grads]).mean(0)
        for rank, pieces in enumerate(made.delivered):
            error = (pieces[i].double() - chunk(total, layout, rank % ranks)).abs()
            # 8 is the largest of a gradient; the second hop sends what the first one gave, then its sum.
            assert not error.numel() or error.max() <= 3 * 8 / 127 * 1.1 * (1 if by_chance else 0.5)
            assert torch.equal(pieces[i], made.delivered[rank % ranks][i])
    if formats[0] is not None:
        assert made.sent().sent.nbytes == (ranks - 1) * INT8.nbytes(made.row.numel)


def int4() -> dict[str, Any]:
    """Return the options of a reduction that encodes by chance."""
    return {"encodings": (Encoding(BlockFormat("int4", 16, stochastic=True), Noise(1)), None)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_adds_its_own_row_as_it_is(ranks: int) -> None:
    """What does not travel is not rounded: where the others have zeros, the mean is exact."""
    layout = ShardLayout((6, 64), (64, 1), 0, ranks)
    for rank in range(ranks):
        made = Chunk([layout], pad_to=16, options=int4())
        grads = [[torch.zeros(6, 64)] for _ in range(ranks)]
        grads[rank][0].copy_(torch.randn(6, 64, generator=torch.Generator().manual_seed(rank)))
        delivered = made.run(grads)
        assert torch.equal(delivered[rank][0], chunk(grads[rank][0], layout, rank) / ranks)


def test_encoded_sums_are_unbiased() -> None:
    """The mean of many reductions is the mean of the gradients, within five standard errors of a step."""
    count, layout = 300, ShardLayout((4, 64), (64, 1), 0, 2)
    options = int4()
    grads = [[torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))] for rank in range(2)]
    total = [torch.zeros(2, 64, dtype=torch.float64) for _ in range(2)]
    for _ in range(count):
        made = Chunk([layout], pad_to=16, options=options)
        for one, pieces in zip(total, made.run(grads)):
            one += pieces[0]
    step = max(own[0].abs().max() for own in grads) / 7
    for rank, one in enumerate(total):
        error = (one / count - chunk((grads[0][0] + grads[1][0]).double() / 2, layout, rank)).abs()
        assert error.max() <= 5 * 0.5 * step / (2 * count) ** 0.5


def test_encoded_gradients_that_are_not_finite_stay_so() -> None:
    layout = ShardLayout((4, 64), (64, 1), 0, 2)
    for bad in (torch.inf, torch.nan):
        grads = [[torch.ones(4, 64)], [torch.ones(4, 64)]]
        grads[1][0][0, 20] = bad
        made = Chunk([layout], pad_to=16, options=int4())
        delivered = made.run(grads)
        assert not delivered[0][0][0, 16:32].isfinite().any() and delivered[1][0].isfinite().all()


def as_with_others() -> dict[str, Any]:
    """Return the options of a reduction on one rank that uses the lanes of several: a hook sees the sums."""
    return {"hook": lambda sums: None}


def test_the_only_rank_sums_on_the_compute_stream() -> None:
    """On lanes of their own, sums took memory that activations could not have: on one GPU fsdp2 reserved more than
    torch's. Shards are made of gradients at once, in one copy, and nothing is held."""
    made = Chunk([weight(16, ranks=1), weight(2, ranks=1)], (torch.bfloat16, torch.float32, torch.float32))
    with Device() as device:
        flying = Reductions(Lanes(torch.device("cpu")))
        flying.memory.count_unit(1 << 20)
        grads = gradients(made)[0]
        expected, held = [grad.float() for grad in grads], weakref.ref(grads[0])
        flying.add(reduce_chunk(grads, made.row, made.plans[0], flying.memory, made.delivered[0].extend))
        assert held() is None and device.streams == [device.compute]
        flying.finish()
    assert all(torch.equal(got, want) for got, want in zip(made.delivered[0], expected)) and not device.mistakes


def test_gradients_that_are_copied_beside_compute_count_and_go_first() -> None:
    """A chunk of the same unit may follow, of other dtypes. Where it has no room beside them and their rows, they go
    before the rows, which the network still reads when the copies are over."""
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    large, small = (Chunk([weight(rows, ranks=1)], dtypes, options=as_with_others()) for rows in (16, 2))
    with Device():
        flying = Reductions(Lanes(torch.device("cpu")))
        flying.memory.count_unit(400)  # bytes of what is copied, 128, of its rows, 256, and less than 48 more
        held = []
        for made in (large, small):
            grads = gradients(made)[0]
            held += [weakref.ref(grads[0])]
            flying.add(reduce_chunk(grads, made.row, made.plans[0], flying.memory, lambda pieces: None))
        assert [reference() is None for reference in held] == [True, False]
        assert len(flying.memory._inputs) == 2
        flying.finish()


@pytest.mark.parametrize(("limit", "beside"), [(213, False), (214, True)])
def test_three_fifths_of_the_limit_are_copied_beside_compute(limit: int, beside: bool) -> None:
    """Two of the three large matrices of a block, if the limit is a block's gradients; here 128 bytes."""
    made = Chunk([weight(16, ranks=1)], (torch.bfloat16, torch.float32, torch.float32), options=as_with_others())
    with Device():
        flying = Reductions(Lanes(torch.device("cpu")))
        flying.memory.count_unit(limit)
        flying.add(reduce_chunk(gradients(made)[0], made.row, made.plans[0], flying.memory, lambda pieces: None))
        assert bool(flying.memory.packed) is beside
        flying.finish()


def test_a_sum_on_its_way_to_the_host_is_not_kept_on_the_device() -> None:
    """Every reduced shard stayed allocated until the end of backward, since the waiting operation still named it."""
    seen: list[weakref.ref[Tensor]] = []
    made = Chunk([weight(8, ranks=1)], options={"offload": True, "hook": lambda out: seen.append(weakref.ref(out))})

    def to_host(out: Tensor, plan: ReducePlan) -> Tensor:
        device.on_host(host := torch.empty_like(out))
        return host.copy_(out, non_blocking=True)

    with Device() as device, mock.patch.object(reduce, "_deliverable", to_host):
        flying = Reductions(Lanes(torch.device("cpu")))
        for _ in range(3):
            grads = gradients(made)[0]
            deliver = lambda pieces: pieces[0].neg_()
            flying.add(reduce_chunk(grads, made.row, made.plans[0], flying.memory, deliver))
        assert len(flying._window) == len(seen) == 3
        assert [reference() is None for reference in seen] == [True, False, False]  # the hook's lane reads two at most
        flying.finish()
    assert not device.mistakes  # the host has waited for each
