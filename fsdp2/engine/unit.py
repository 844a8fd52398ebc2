"""A unit, one ``fully_shard`` call at run time: what happens around the forward and backward of its modules.

Here hooks of torch become calls of the engine. A forward call is classified at its entry (``FSDPState._classify``);
passes and groups do the rest.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2._naming import class_name
from fsdp2._torch.autograd import autograd_sequence_number, functorch_active
from fsdp2._torch.fsdp import TorchFSDPState, torch_fully_shard
from fsdp2._torch.hooks import (
    dispatch_modes,
    is_exporting,
    outside_dynamo,
    outside_dynamo_and_modes,
    skipped_by_dynamo,
)
from fsdp2._torch.modules import (
    REGISTRY_KEY,
    STATE_KEY,
    ComposableState,
    RegistryItem,
    composable_state,
    insert_composable_state,
)
from fsdp2.autograd import hooks
from fsdp2.autograd.boundary import Boundary
from fsdp2.autograd.nesting import calls_under_way, counts_as_call, is_called_by_method
from fsdp2.autograd.side_outputs import SideOutputs
from fsdp2.autograd.trees import Tree
from fsdp2.engine.backward import BackwardPass
from fsdp2.engine.casts import cast_inputs, cast_output, move_inputs
from fsdp2.engine.forward import ForwardPass
from fsdp2.engine.group import ComputedWith, FSDPParamGroup
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import is_managed_tensor
from fsdp2.engine.passes import Call, CallKind, Pass, backward_runs
from fsdp2.engine.registry import Registry
from fsdp2.engine.root import RootContext, kind_of_forward, running_roots
from fsdp2.policies import MixedPrecisionPolicy

__all__ = [
    "Adopting",
    "FSDPState",
    "FoundBelow",
    "apis_of",
    "call_method",
    "explain_with",
    "get_state",
    "is_managed_by_torch",
    "keep_state",
    "live_units",
    "register_as_managed",
    "units_so_far",
]

_Used = Mapping[FSDPParamGroup, "ComputedWith | None"]
"""The groups of a unit, and what a call computed with."""

_live: Registry[FSDPState] = Registry()  # every unit
_ran: Registry[FSDPState] = Registry()  # those that have run under a root
_explain: Callable[[BaseException | None, Iterable[FSDPParamGroup]], None] | None = None


def explain_with(explain: Callable[[BaseException | None, Iterable[FSDPParamGroup]], None]) -> None:
    """Have ``explain(error, groups)`` add to the text of each error that leaves a forward or a registered method.

    ``fsdp2/hints.py`` calls this when it is imported: the engine does not depend on it.
    """
    global _explain
    _explain = explain


def live_units() -> list[FSDPState]:
    """Return every unit of the process, in no order; a submodule that is no unit has no other way to find its own."""
    return list(_live)


def units_so_far() -> tuple[int, int]:
    """Return how many units this process has made, and how many of them have run under a root."""
    return _live.added, _ran.added


def get_state(module: nn.Module) -> FSDPState | None:
    """Return the state of the call that ``module`` was passed to, None if it was passed to none."""
    state = composable_state(module)
    return state if isinstance(state, FSDPState) else None


def keep_state(module: nn.Module, state: FSDPState) -> None:
    """Let ``state`` be found from ``module``, by ``get_state`` and where torch keeps that of its ``fully_shard``."""
    insert_composable_state(module, state)
    module.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard] = state


def is_managed_by_torch(module: nn.Module) -> bool:
    """Return whether torch's own ``fully_shard`` was called on ``module``."""
    return isinstance(composable_state(module), TorchFSDPState)


def apis_of(module: nn.Module) -> dict[str, Any]:
    """Return the composable APIs (``fully_shard``, ``replicate``, ...) called on ``module``, by name."""
    return module.__dict__.get(REGISTRY_KEY) or {}


def register_as_managed(module: nn.Module, apis: dict[str, Any]) -> None:
    """Add ``fully_shard`` to ``apis``, and make them what ``apis_of(module)`` returns."""
    apis["fully_shard"] = RegistryItem()
    module.__dict__[REGISTRY_KEY] = apis


def _has_unmanaged(module: nn.Module) -> bool:
    """Return whether no unit manages one of the module's own parameters (it is ignored)."""
    return not all([param is None or is_managed_tensor(param) for param in module._parameters.values()])


@counts_as_call
def call_method(
    self: nn.Module, unit: FSDPState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function``, which computes with parameters of ``self``, a module of ``unit``, as ``forward`` is called."""
    outermost = unit.root.forward is None
    try:
        args, kwargs = unit.pre_forward(self, args, kwargs)
        return unit.post_forward(self, args, function(*args, **kwargs))
    except Exception as error:
        unit.explain(error)  # the hook on errors of forward does not see this call
        if outermost:
            unit.break_off_forward()
        raise


def _uses_around(group: FSDPParamGroup, run: Pass) -> bool:
    """Return whether a forward of another root uses ``group`` now, because it has called the forward of ``run``."""
    others = [root.forward for root in running_roots() if root.forward is not run]
    users = [other.outermost for other in others if other is not None and other.uses_shared(group)]
    return any(calls_under_way(unit.modules[0]) for unit in users)  # else an interrupt has left that forward


def _advance(resume: Callable[[Any], Any], sent: Any) -> tuple[bool, Any]:
    """Run a generator to its next ``yield`` or to its end; return whether it has ended, and its value."""
    try:
        return False, resume(sent)
    except StopIteration as end:
        return True, end.value


class _Entry:
    """Lets backward enter a unit by an output of one of its calls.

    It is an object of a class of ours, by which ``autograd.hooks`` tells our hooks from others.
    """

    __slots__ = ("_around", "_unit", "_used")

    def __init__(self, unit: FSDPState, call: Call) -> None:
        self._unit = unit
        self._used = {group: group.computed_with for group in unit.present}
        # The calls that this one is inside. Backward enters their units by their own outputs, unless the loss uses only
        # outputs of units inside them, which a hook has captured. It needs their weights all the same, below this unit.
        self._around = [other for other in call.run.entered if other.groups]

    @skipped_by_dynamo
    def __call__(self, grad: torch.Tensor | None) -> None:
        self._unit.pre_backward(grad, self._used)
        for unit in reversed(self._around):  # the outermost last, as when all enter by one tensor
            if not all([group.is_entered for group in unit.present]):
                unit.pre_backward(grad)


class FoundBelow(NamedTuple):
    """What a call has found below the modules of its unit."""

    others: list[nn.Module]  # modules that it does not manage
    ignores: bool  # it ignores a parameter of those that it does
    removed: list[FSDPParamGroup]  # groups none of whose modules is there any more


class Adopting(Protocol):
    """The arguments of the ``fully_shard`` call (``grouping.CallOptions``), by which parameters are added later."""

    @property
    def options(self) -> GroupOptions:
        """The options of a group that is made when the unit has none."""

    def with_options(self, options: GroupOptions) -> Adopting:
        """Return the same with other options of such a group."""

    def adopt_added(self, unit: FSDPState) -> FoundBelow:
        """Manage parameters that appeared below the modules of ``unit`` since."""

    def copied(self, memo: dict[int, Any]) -> Adopting:
        """Return the same for a deep copy of the modules."""

    def ignored_now(self) -> set[nn.Parameter]:
        """Return the parameters that the call leaves as they are."""


class FSDPState(ComposableState):
    """One unit: the modules of a ``fully_shard`` call, their groups (one per mesh), and the root they run under.

    The class has torch's name. Modules of a grouped call are its *members*.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        made_by: Adopting,
    ) -> None:
        """``made_by`` takes in parameters that are added later."""
        super().__init__()
        self.modules = modules
        self.device = device
        self.mp_policy = mp_policy
        self.groups: list[FSDPParamGroup] = []
        self.present = self.groups  # without those of modules that were removed, which may come back
        self.name = ""
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        # torch's memory tracker removes our forward hooks by these handles, to put its own around them.
        self._pre_forward_hook_handle: RemovableHandle | None = None
        self._post_forward_hook_handle: RemovableHandle | None = None
        # Its own root holds settings until the first forward, and for good in the outermost unit. The root that it runs
        # under is another's: a weak reference, or one leaf would keep a whole model alive.
        self._own_root: RootContext[FSDPState] = RootContext(device, self)
        self._root: weakref.ref[RootContext[FSDPState]] | None = None
        self._calls: list[Call] = []  # that are under way, the latest last; an exception may leave some behind
        self._side_outputs = SideOutputs(
            modules, lambda module: get_state(module) is not None, {STATE_KEY, REGISTRY_KEY}
        )
        self._has_units_below = False  # known from the first forward on
        self._notices_errors = False  # whether a hook tells when an exception leaves its forward
        # Asked only when the process has counted registrations that this unit has not seen.
        self.made_by = made_by
        self._registrations = hooks.registrations
        # While summon_full_params shows parameters of the unit: why forward cannot compute with them, with a remedy, or
        # "" if it can. It is not on the groups: it depends on all of them, and a unit without parameters has none.
        self.why_no_forward: str | None = None
        _live.add(self)

    @property
    def root(self) -> RootContext[FSDPState]:
        """The root that the unit runs under, which all units of the tree share."""
        root = None if self._root is None else self._root()
        return self._own_root if root is None else root

    @property
    def is_root(self) -> bool | None:
        """Return whether it is the outermost unit; None until the first forward shows that."""
        root = None if self._root is None else self._root()
        return None if root is None else root is self._own_root

    @property
    def members_to_run(self) -> set[nn.Module]:
        """The modules whose part of the forward that runs is still to come, its own included."""
        return self._calls[-1].members if self._calls else set()

    # ---- forward ----

    @outside_dynamo_and_modes(lambda unit: unit.outer_modes)
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> hooks.Arguments:
        """Gather, cast inputs, and put hooks on inputs for the moment when backward has their gradients."""
        if self.why_no_forward is not None:
            self._forget_interrupted_block()
        if self.why_no_forward is not None:
            self._check_summoned()
            return args, kwargs
        call, first = self._enter(module)
        run, trains = call.run, torch.is_grad_enabled()
        moves = first and run.outermost is self and self.device.type != "cpu"
        given = None
        if moves or trains or self.mp_policy.param_dtype is not None:
            given = Tree((*args, *kwargs.values()), search=trains)
            if moves:
                given.tensors = move_inputs(self.device, given.tensors)
            if self.mp_policy.param_dtype is not None:
                given.tensors = cast_inputs(self.mp_policy, given.tensors)
        if call.kind is CallKind.RECOMPUTED:
            for group in self.present:  # an earlier post-backward may have resharded
                group.unshard_now(run.launch, in_backward=True)
        forward = run if first and call.kind is CallKind.NORMAL and isinstance(run, ForwardPass) else None
        if forward is not None and forward.follows_compute:
            self.root.comm.lanes.gather_after_compute()  # which may have written to shards that are gathered now
        ahead: list[FSDPParamGroup | None] = []
        if call.kind is CallKind.NORMAL:
            entering = []  # groups that no other call uses: this call's inputs tell when backward is done with them
            for group in self.present:
                only_user = first and (not group.shared or self._enter_shared(group, run))
                quiet = forward is not None and forward.is_quiet(group)
                late = group.pre_forward(run, first=only_user, quiet=quiet)
                if only_user:
                    entering.append(group)
                if forward is not None:  # a backward, in which this runs anew, gathers ahead by itself
                    ahead.append(forward.visit(group, quiet=quiet, late=late))
            if trains and given is not None:
                self._watch_inputs(call.boundary, given, entering)
        if given is not None:
            args, kwargs = call.boundary.enter(given, args, kwargs)
        if forward is not None:
            self._prefetch_forward(forward, ahead)
        return args, kwargs

    def _watch_inputs(self, boundary: Boundary, given: Tree, entering: list[FSDPParamGroup]) -> None:
        """Put hooks on what a call was ``given``, for the moment when backward is done with ``entering``."""
        if boundary.first_node < 0:  # else the first member of a grouped call has set it
            boundary.first_node = autograd_sequence_number()
        if entering:
            need_none = boundary.watch_inputs(given, partial(self._inputs_done, entering), self.pre_backward)
            for group in entering:
                self.root.pending.expect(group, inputs_need_none=need_none)

    def _enter(self, module: nn.Module) -> tuple[Call, bool]:
        """Return the call that a forward starts or goes on with, and whether it starts."""
        in_backward, root = backward_runs(), self.root
        if root.forward is None and not in_backward:
            self._refuse_export()
        if self._root is None or self._root() is None:
            self.init_root()
            root = self.root
        if not in_backward:
            if root.forward is None:
                # Several roots may have this unit: it runs under the one whose forward is under way.
                for other in running_roots():
                    if self in other.all_states:
                        self._root, root = weakref.ref(other), other
                        break
            self._look_for_changes(root)
            if self._root is None:  # it was removed from below that root, and is run by itself
                self.init_root()
                root = self.root
        return self._classify(root, module, in_backward)

    def _look_for_changes(self, root: RootContext[FSDPState]) -> None:
        """Take in modules and parameters that were added since the last forward."""
        if root.forward is None:
            root.notice_inserted()
        if self._registrations != hooks.registrations:
            if root.forward is None:
                root.all_states[0].follow_units()
            # The outermost forward looks for all: a unit's gather may start before its own forward.
            for unit in root.all_states if root.forward is None else [self]:
                unit.notice_added()
            root.limit_communication()

    def _classify(self, root: RootContext[FSDPState], module: nn.Module, in_backward: bool) -> tuple[Call, bool]:
        """Classify a forward call. The first case that applies counts.

        Recomputed inside the unit's own backward; another member of a grouped call that is under way, which goes on; a
        call inside a call of the same module (recursion, or a registered method that calls forward); an ordinary one.
        """
        calls = self._calls
        if in_backward and any([group.phases.in_backward for group in self.groups]):
            backward = root.enter_backward()
            backward.recomputed[self] = None
            return self._start_call(CallKind.RECOMPUTED, backward), True
        running = root.backward if in_backward else root.forward
        latest = calls[-1] if calls and calls[-1].run is running else None
        if latest is not None and latest.members and len(self.modules) > 1:
            return latest, False
        depth = calls_under_way(module) if calls else 1
        if latest is not None and depth > 1:
            # Gathered already, and both are through when the outer call is.
            if not in_backward and latest.run.outermost is self and is_called_by_method(module):
                root.begin_forward_in_method()
            return self._start_call(CallKind.RECURSIVE, latest.run, depth), True
        if root.forward is None and not in_backward:
            self._notice_errors()
        run = root.enter_backward() if in_backward else root.begin_forward(self)
        if calls and (depth == 1 or calls[-1].run is not run):
            calls.clear()  # left behind by exceptions
        call = run.entered[self] = self._start_call(CallKind.NORMAL, run)
        call.members = set(self.modules)
        return call, True

    def _start_call(self, kind: CallKind, run: Pass, depth: int = 0) -> Call:
        device = self.root.comm.device
        call = Call(kind, run, Boundary(self._outlasting, self._side_outputs, device), depth)
        self._calls.append(call)
        return call

    @outside_dynamo_and_modes(lambda unit: unit.outer_modes)
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free, put hooks on outputs so that backward gathers first, cast outputs.

        A grouped call is complete with its last member, or when the outermost forward ends without that member.
        """
        call = self._leave(module)
        result = Tree((output,), results=True)
        if call is not None:
            self._end(call, result)
        if self.mp_policy.output_dtype is not None:
            result.tensors = cast_output(self.mp_policy, result.tensors)
        if result.opaque and call is not None and type(output) is GeneratorType and not torch.is_grad_enabled():
            return self._resumed(module, output)  # with gradients, the unit stays in memory for its backward
        return result.rebuilt()[0]

    def _resumed(self, module: nn.Module, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Go through ``generator``, which computes with parameters of ``module`` when the call that made it is over.

        Each part of it, from one ``yield`` to the next, is a call of its own.
        """
        resume, sent = generator.send, None
        try:
            while True:
                ended, item = call_method(module, self, _advance, (resume, sent), {})
                if ended:
                    return item
                try:
                    resume, sent = generator.send, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:  # the caller throws it into the generator
                    resume, sent = generator.throw, error
        finally:
            generator.close()

    def _end(self, call: Call, result: Tree) -> None:
        """End ``call``, or one member's part of it."""
        call.boundary.leave(result)
        if call.kind is not CallKind.NORMAL:
            return  # a part of another call
        if call.members:
            # Not complete, but backward may enter by this member's output.
            if torch.is_grad_enabled():
                call.boundary.watch_results(result, self._enter_member)
            return
        self._complete(call, result)
        root = self.root
        if root.forward is not None and root.forward.outermost is self:
            # Grouped calls whose other members did not run in this forward end with it.
            for unit, unfinished in reversed(list(root.forward.entered.items())):
                unit._calls.clear()
                unit._complete(unfinished, result)
            root.end_forward()

    def _outlasting(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``tensors`` with copies of full parameters of the unit and their views, whose memory will be freed."""
        if functorch_active():  # its tensors have no storage to compare
            return tensors
        for group in self.groups:
            tensors = [tensor.clone() if group.store.lies_in_full(tensor) else tensor for tensor in tensors]
        return tensors

    @property
    def outer_modes(self) -> int:
        """The number of dispatch modes around the whole pass, which may see what hooks do; inner ones may not.

        An inner mode belongs to a checkpoint (it caches outputs of operators) or the like, not to the program.
        """
        if not backward_runs() and self.is_root is not False:
            return dispatch_modes()
        running = self.root.running
        if running is None:  # a backward that comes first to a forward that it runs again, in a checkpoint
            return min(dispatch_modes(), self.root.outer_modes)
        return running.outer_modes

    def _leave(self, module: nn.Module) -> Call | None:
        """Return the call that ends, or one of whose members ends.

        None within ``summon_full_params``, and if an exception has ended the pass of a call that handled it.
        """
        calls = self._calls
        if self.why_no_forward is not None or not calls:
            return None
        while calls[-1].kind is CallKind.RECURSIVE and calls_under_way(module) < calls[-1].depth:
            calls.pop()  # left behind by an exception
        call = calls[-1]
        # A shallow copy runs the same hooks, with itself as ``module``.
        call.members.discard(module if len(self.modules) > 1 else self.modules[0])
        if not call.members:
            calls.pop()
        return call

    def _complete(self, call: Call, result: Tree) -> None:
        """End the forward of all members, whether they ran or not: free, and put hooks on the ``result``."""
        in_backward, trains = backward_runs(), torch.is_grad_enabled()
        # An exception may have ended the pass before the call.
        run = None if call.run.entered.pop(self, None) is None else call.run
        if trains:
            call.boundary.end()
            if self.present:
                self._watch_results(call, result, in_backward)
            if result.opaque:
                self.root.pending.opaque.update(self.present)
        # No hook can be put on tensors inside a function or a generator, so backward may enter there without a gather.
        self._release(call, run, in_backward, stays=trains and result.opaque)

    def _release(self, call: Call, run: Pass | None, in_backward: bool, *, stays: bool) -> None:
        """Free what the call computed with, or keep it, as its pass decides; keep it for backward if it ``stays``.

        The groups are freed if there is no ``run`` any more.
        """
        # Inside another root's backward (a teacher in a checkpointed loss), a forward without gradients has no backward
        # that would free what it gathered.
        unfreed = isinstance(run, BackwardPass) and not run.started and not torch.is_grad_enabled()
        forward = run if isinstance(run, ForwardPass) else None
        for group in self.present:
            if group.shared and not self._leave_shared(group, call.run):
                continue  # another unit computes with it
            after = True if forward is None else forward.decide_after(group)
            if stays and forward is not None:
                after = False
            group.post_forward()
            if forward is not None and forward.keeps(group):
                group.residency.note_left()  # the forward may write to its shards before it uses it again
            elif unfreed or not in_backward:  # after a recomputation, backward computes with it next, and frees it
                group.release(after)
            # What ``stays`` is computed with before backward too: a generator runs when the call that made it is over.
            if forward is not None and not stays and self._stays_for_backward(forward, group):
                group.residency.show_shards()  # as after any forward that frees: it stays for backward alone
        if unfreed and isinstance(run, BackwardPass):
            self.root.leave_unstarted_backward(run)

    def _enter_shared(self, group: FSDPParamGroup, run: Pass) -> bool:
        """Note that this unit uses ``group`` in ``run``, and return whether no other unit does so now."""
        return run.enter_shared(group, self) and not _uses_around(group, run)

    def _leave_shared(self, group: FSDPParamGroup, run: Pass) -> bool:
        """Note that this unit uses ``group`` in ``run`` no more, and return whether no other unit does."""
        return run.leave_shared(group, self) and not _uses_around(group, run)

    def _watch_results(self, call: Call, result: Tree, in_backward: bool) -> None:
        """Put hooks on what the forward computed, by which backward enters the unit."""
        made = autograd_sequence_number() - call.boundary.first_node
        for group in self.present:
            group.gradients.expect_from(made)
        units = [self, *call.run.entered]
        # Also if parameters are kept: a backward on another forward may free them first.
        sides = None if in_backward else lambda: [unit.pre_backward for unit in units]
        if call.boundary.watch_results(result, _Entry(self, call), sides) and not in_backward:
            self.root.pending.record(self.present)

    def _stays_for_backward(self, run: ForwardPass, group: FSDPParamGroup) -> bool:
        """Return whether ``group`` stays for backward alone: that of this forward, or of one before an evaluation."""
        return group in run.stayed or (not run.trains and group in self.root.pending.stayed)

    def _forget_interrupted_block(self) -> None:
        """Forget a block of ``summon_full_params`` that was interrupted at its end, when it showed nothing any more."""
        if self.groups and not any(group.residency.summoned for group in self.groups):
            self.why_no_forward = None

    def _check_summoned(self) -> None:
        """Allow a forward that computes with what ``summon_full_params`` shows, in its dtype, if that is right.

        Raises:
            RuntimeError: the forward cannot compute with that, or a backward could follow, whose gradients would not be
                reduced.
        """
        for group in self.groups:
            group.residency.refuse_interrupted("forward")
        reason = self.why_no_forward
        if torch.is_grad_enabled():
            reason = "a backward could follow, whose gradients would not be reduced; run it under torch.no_grad()"
        if reason:
            raise RuntimeError(
                f"{self.name or 'the root'}: forward inside summon_full_params; {reason}, or leave the context first"
            )

    def _refuse_export(self) -> None:
        """Raise RuntimeError inside a function of torch that writes down what a forward does, for other programs."""
        if is_exporting():
            raise RuntimeError(
                f"{self.name or 'the root'}: forward inside torch.export, torch.onnx.export, torch.jit.trace, make_fx "
                "or torch.func.linearize, which cannot record how parameters are gathered; got shards, expected full "
                "parameters. On all ranks, export inside `with torch.no_grad(), fsdp2.summon_full_params(model, "
                "writeback=False):`"
            )

    def _prefetch_forward(self, run: ForwardPass, following: list[FSDPParamGroup | None]) -> None:
        """Start gathering what a prefetch list names, or else the groups ``following`` those of this unit."""
        for unit in self.forward_prefetch:
            if unit.root is self.root:  # gathers of another root belong to its own passes
                for group in unit.present:
                    if run.quietly or not run.route.comes_late(group):
                        run.prefetch(group)
        for named in following:
            if not self.forward_prefetch and named is not None and named not in self.groups:
                for group in named.gathered_with:
                    run.prefetch(group)

    def notice_added(self) -> None:
        """Take in what somebody put on the modules, or below them, since this was last asked."""
        seen = hooks.registrations
        if self._registrations != seen:
            others, ignores, removed = self.made_by.adopt_added(self)
            leaving = self._leave_out(removed)
            self._has_units_below = any([get_state(module) not in (None, self) for module in others])
            several = len(self.groups) > 1 or self._has_units_below or ignores or any(map(_has_unmanaged, others))
            outermost = [] if self.is_root is None else self.root.all_states[0].groups
            for group in self.groups:
                group.has_others_below = several
                group.gathered_with = [group] if group.shared else self.present
                group.in_root = group in outermost
            # Not if that raised: the next forward must look again, and refuse again. So it must for what is leaving.
            self._registrations = -1 if leaving else seen

    def _leave_out(self, removed: list[FSDPParamGroup]) -> bool:
        """Compute with ``removed`` groups no more, and return whether a pass still needs some of them."""
        root = self.root
        needed = [group for group in removed if root.running is not None or root.pending.expects(group)]
        leaving = [group for group in needed if group in self.present]
        left = {*removed}.difference(leaving)
        self.present = [group for group in self.groups if group not in left] if left else self.groups
        return bool(leaving)

    def forget_calls(self, run: Pass) -> None:
        """Forget calls that ``run`` has left unended: they refer to tensors whose graph refers to this unit."""
        self._calls[:] = [call for call in self._calls if call.run is not run]

    def reconcile(self) -> None:
        """Take in what others have put on the modules; everyone who reads or writes parameters calls this first."""
        if self.why_no_forward is None:  # what summon_full_params shows would look like added parameters
            self.notice_added()
        lasting = self.root.running is None  # else it may have been put there for the call that runs
        for group in self.groups:
            group.residency.reconcile(lasting=lasting)

    def add_shared(self, group: FSDPParamGroup) -> None:
        """Use ``group``, which other units use too."""
        for groups in (self.groups,) if self.present is self.groups else (self.groups, self.present):
            groups.append(group)

    def include(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Let ``groups`` of the unit, which were added to it, run under its root from now on."""
        for group in groups:
            group.use_comm(self.root.comm)
            group.set_names(self.name, {})
        self._share_lanes()

    def _share_lanes(self) -> None:
        """Let roots that share units or tied parameters communicate on the same lanes: a pass waits for its own alone.

        This root, which may be new, switches to the lanes of another one, where something may be in flight.
        """
        groups = {*self.root.groups}
        roots = dict.fromkeys(unit.root for unit in live_units())
        comms = dict.fromkeys(root.comm for root in roots if not groups.isdisjoint(root.groups))
        if len(comms) > 1:
            comm = next(other for other in comms if other is not self.root.comm)
            for root in roots:
                if root.comm in comms:
                    root.use_comm(comm)

    # ---- backward ----

    @outside_dynamo
    def pre_backward(self, grad: torch.Tensor | None, used: _Used | None = None) -> None:
        """Gather for backward, and start the gather of the groups backward meets next.

        ``used`` are the groups and parameters of the call whose backward this is; without it, of the last one.
        """
        if self.why_no_forward is not None:
            for group in self.groups:
                group.residency.refuse_summoned("backward")
        root = self.root
        run, pending, comm = root.start_backward(), root.pending, root.comm
        run.creates_graph = torch.is_grad_enabled()
        if run.creates_graph:  # the backward of this backward enters here by a way that has no hook yet
            hooks.watch_exit(grad, lambda outgoing: self.pre_backward(outgoing, used))
        entered = []
        for group in self.present:  # all of this unit's gathers go ahead of those for later
            if used is not None:
                computed_with = used.get(group)  # None of one that was added since
            else:
                computed_with = group.computed_with if pending.expects(group) else None
            if group.pre_backward(run.launch, computed_with):
                entered.append(group)
        for group in entered:
            comm.drop_postponed(group)
            following = pending.calls.visit(group)  # recorded also with a prefetch list, as in forward
            end, final = partial(run.post_backward, group), following is None
            group.gradients.begin_backward(run, end, count=pending.ends_by_gradients(group), final=final)
            if not self.backward_prefetch and following is not None and following not in self.groups:
                # Not if the gradients are finished later: after units below, or after an earlier call of this one.
                ends_here = not self._has_units_below and not pending.calls.has_unvisited(group)
                later = ends_here and group.gradients.gathers_later
                for other in reversed(following.gathered_with):
                    if other.store.options.unshard_in_backward and later:
                        comm.postpone_gather(other, partial(run.prefetch, other))
                    elif other.store.options.unshard_in_backward:
                        run.prefetch(other)
        for unit in self.backward_prefetch:
            if unit.root is root:  # as in forward
                for group in reversed(unit.present):
                    run.prefetch(group)

    def _enter_member(self, grad: torch.Tensor | None) -> None:
        """Enter backward by the output of one member of a grouped call.

        Not while a recomputed forward of the unit is under way: its own outputs are entered when it is over.
        """
        if not all([group.phases.in_forward for group in self.present]):
            self.pre_backward(grad)

    def _inputs_done(self, groups: list[FSDPParamGroup]) -> None:
        """End the backward of ``groups``: all gradients of their inputs are computed.

        Under torch.func this is the first call that tells of a backward at all.
        """
        root = self.root
        run = root.start_backward()
        for group in reversed(groups):
            if root.pending.leave_call(group):
                run.post_backward(group)

    def notice_backward(self) -> None:
        """Start a backward pass: a gradient is finished although no backward entered the group by its outputs."""
        self.root.start_backward()

    # ---- the root ----

    def init_root(self) -> None:
        """Make this unit the root of all units under its module, because its forward is the first to run.

        A submodule that was a root before becomes part of the new root's tree.

        Raises:
            RuntimeError: this call grouped several modules, backwards of a unit below are ended by the caller, or
                parameters are still on the meta device.
            Exception: a parameter that was added since ``fully_shard`` cannot be managed.
        """
        names = self._units_below()
        root, error = self._own_root, self._why_no_root(names)
        for unit, name in names.items():
            unit._run_under(root, name)
        root.take_over(list(names))
        self._share_lanes()
        try:
            try:
                if error is None:
                    self._prepare_all(names)
                    root.limit_communication()
            except Exception as reason:  # of any type: shard_placement_fn of an added parameter may raise its own
                error = reason
            # An error of this rank goes to the observer first, so that the other ranks raise it instead of waiting.
            root.observe(error, kind_of_forward())
            if error is not None:
                raise error
        except BaseException:  # an interrupt too: units behind the one where it came are not prepared
            for unit in names:
                unit._root = None  # the next forward looks again
            raise

    def _units_below(self) -> dict[FSDPState, str]:
        """Return the units of the module and of those below it, in their order, with their names in it."""
        names: dict[FSDPState, str] = {}
        for name, module in self.modules[0].named_modules():
            unit = get_state(module)
            if unit is not None:
                names[unit] = f"{names[unit]}, {name}" if unit in names else name
        return names

    def follow_units(self) -> None:
        """Take in units that were inserted below this one, which is a root, and let go of those that were removed.

        Raises:
            RuntimeError: backwards of an inserted unit are ended by the caller.
        """
        names, root = self._units_below(), self._own_root
        before = root.all_states
        if list(names) == before:
            return
        if (error := self._why_no_root(names)) is not None:
            raise error
        removed = [unit for unit in before if unit not in names and unit.root is root]
        for unit in removed:
            unit._root = None  # its next forward looks for a root
        for unit, name in names.items():
            unit._run_under(root, name)
        try:
            root.take_over(list(names))
            root.forget_units(removed)
            self._share_lanes()
            self._prepare_all([unit for unit in names if unit not in before])
        except BaseException:
            root.all_states = before  # the next forward looks again, and refuses again
            raise

    def _run_under(self, root: RootContext[FSDPState], name: str) -> None:
        """Run under ``root`` from now on, whose module calls this unit's modules ``name``."""
        _ran.add(self)
        self._root = weakref.ref(root)
        if self._own_root.comm is not root.comm:
            self._own_root.comm.forget_states()  # if it was run by itself before: it communicates elsewhere now
        self.name = name

    @staticmethod
    def _prepare_all(units: Collection[FSDPState]) -> None:
        """Make ``units`` ready for their first forward under a root."""
        for unit in units:
            unit._prepare()
        for unit in units:  # when all have looked: a tied parameter may have been replaced at places of several units
            for group in unit.groups:
                group.lazy_init()

    def _prepare(self) -> None:
        """Take in what happened to the unit's parameters since ``fully_shard``."""
        self._registrations = -1  # look in any case: what was inserted since fully_shard is not counted
        self.notice_added()

    def _notice_errors(self) -> None:
        """Learn when an exception leaves this unit's forward, which is the outermost."""
        if not self._notices_errors:
            self._notices_errors = True
            for module in self.modules:
                hooks.hook_error(module, self._forward_is_left)

    @outside_dynamo
    def _forward_is_left(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called when a forward of the unit is left, after ``post_forward``, which an exception skips.

        There may be an ``output`` all the same: a forward hook of the user raised. A call inside another one of the
        same module does not end the pass: the outer one may handle the exception.
        """
        run = self.root.forward
        if run is None or run.outermost is not self:
            return  # nothing was raised, or not in the outermost forward
        self.explain(sys.exc_info()[1])
        if calls_under_way(module) == 1:
            self.break_off_forward()

    def break_off_forward(self) -> None:
        """End the forward pass in which this unit is the outermost, if there is one: an exception has left it."""
        run = self.root.forward
        if run is None or run.outermost is not self or backward_runs():
            return
        self.root.break_off_forward()

    def explain(self, error: BaseException | None) -> None:
        """Add to the text of ``error``, which leaves a forward or a registered method, which shards it is about."""
        if _explain is not None:
            _explain(error, self.root.groups)

    def _why_no_root(self, names: Mapping[FSDPState, str]) -> Exception | None:
        """Return the error if this unit cannot be the root of the units with these ``names``, else None.

        It is not raised here, because the other ranks must raise it too.
        """
        if len(self.modules) > 1:
            return RuntimeError(
                f"FSDP requires a single root module but got {self.modules}; call fully_shard on the module whose "
                "forward runs first as well"
            )
        for unit, name in names.items():
            if unit is not self and unit.root is not self._own_root and unit.root.manual:
                return RuntimeError(
                    f"set_manual_backward_finalization must be called on the root FSDP module; it was called on {name} "
                    f"below {class_name(self.modules[0])}, whose forward began here. Call it on that one instead"
                )
        return None
