"""One ``fully_shard`` call at run time: what happens before and after the forward and backward of its modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2._torch.autograd import autograd_sequence_number, graph_task_id
from fsdp2._torch.dynamo import outside_dynamo
from fsdp2._torch.modes import dispatch_modes, outside_modes
from fsdp2._torch.modules import ComposableState, composable_state
from fsdp2.autograd.hooks import (
    Arguments,
    hook_error,
    registrations,
    watch_inputs,
    watch_outputs,
    watch_transformed,
)
from fsdp2.autograd.nesting import calls_under_way
from fsdp2.autograd.side_outputs import LeftOnModules
from fsdp2.autograd.trees import map_tensors
from fsdp2.engine.casts import cast_inputs, cast_output
from fsdp2.engine.finalization import Finalization
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.hints import explain, explain_at_exit
from fsdp2.engine.lifecycle import Phase, Residency
from fsdp2.engine.param import FSDPParam, Slot
from fsdp2.engine.root import CommContext, RootContext
from fsdp2.policies import MixedPrecisionPolicy

__all__ = ["Adopting", "FSDPState", "get_state", "live_states"]

_live: weakref.WeakSet[FSDPState] = weakref.WeakSet()


def live_states() -> list[FSDPState]:
    """Every state of the process, in no particular order; a submodule of a unit has no other way up to its own."""
    return list(_live)


def _shards(states: Iterable[FSDPState]) -> dict[FSDPParam, str]:
    groups = dict.fromkeys(group for state in states for group in state.groups)
    return {p: g.name for g in groups if g.lifecycle.residency is Residency.SHARDED for p in g.params}


def get_state(module: nn.Module) -> FSDPState | None:
    """The state of the call that ``module`` was passed to, None if it was passed to none."""
    state = composable_state(module)
    return state if isinstance(state, FSDPState) else None


class Adopting(Protocol):
    """What the call that made a state leaves with it."""

    def adopt_added(self, state: FSDPState) -> None:
        """Manage parameters that appeared below the modules of ``state`` since."""

    def copied(self, memo: dict[int, Any]) -> Adopting:
        """The same for a deep copy of the modules."""


class FSDPState(ComposableState):
    """The modules of one call, their groups (one per mesh), and the root they run under."""

    def __init__(self, modules: tuple[nn.Module, ...], device: torch.device, mp_policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.modules = modules
        self.device = device
        self.mp_policy = mp_policy
        self.groups: list[FSDPParamGroup] = []
        self.root = RootContext(CommContext(device), self)
        self.is_root: bool | None = None  # decided by the first forward
        self.name = ""
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.members_to_run: set[nn.Module] = set()
        self._recursive = False  # its forward has called it again
        # torch's memory tracker takes our hooks out and puts its own in; then handles are all it needs.
        self._pre_forward_hook_handle: RemovableHandle | None = None
        self._post_forward_hook_handle: RemovableHandle | None = None
        self._first_node = 0
        self._left = LeftOnModules(modules, lambda module: get_state(module) is not None)
        self._explains = False  # errors that leave its forward
        # Takes in parameters added since; asked when the process has seen registrations that this state has not.
        self.unit: Adopting | None = None
        self._registrations = registrations()
        # While summon_full_params shows its parameters: why forward cannot compute with them, "" if it can.
        self.summoned: str | None = None
        _live.add(self)

    # ---- forward ----

    @outside_dynamo
    @outside_modes(lambda state: state.outer_modes)
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Gather, cast inputs, and arrange for backward to tell when it is through with them."""
        if self.summoned is not None:
            self._check_summoned()
            return args, kwargs
        if self.is_root is None:
            self.init_root()
        in_backward = graph_task_id() != -1
        if self._registrations != registrations() and not in_backward:
            # The outermost forward looks for all: a unit's gather may start before its own forward.
            for state in self.root.all_states if self.root.forward_root is None else [self]:
                state.notice_added()
        if in_backward and any(group.lifecycle.phase is Phase.BACKWARD for group in self.groups):
            for group in self.groups:  # an earlier post-backward may have resharded
                group.unshard_now()
            return cast_inputs(self.mp_policy, args, kwargs)
        first = len(self.modules) == 1 or not self.members_to_run
        if self.members_to_run and first and calls_under_way(module) > 1:
            self._recursive = True  # gathered already, and both are through when the outer call is
            return cast_inputs(self.mp_policy, args, kwargs)
        if first:
            self.members_to_run.update(self.modules)
            if not in_backward and self.root.begin_forward(self):
                args, kwargs = self._move_inputs(args, kwargs)
        args, kwargs = cast_inputs(self.mp_policy, args, kwargs)
        entering = [group for group in self.groups if group.pre_forward(self)]
        if torch.is_grad_enabled():
            self._first_node = autograd_sequence_number()
            for group in entering:
                (args, kwargs), watched = watch_inputs(args, kwargs, group.inputs_done)
                group.note_inputs(tell=watched)
        if first and not in_backward:
            self._prefetch_forward()
        return args, kwargs

    @outside_dynamo
    @outside_modes(lambda state: state.outer_modes)
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, arrange for backward to gather first, cast outputs; a grouped call does so with its last member."""
        if self.summoned is not None:
            return cast_output(self.mp_policy, output)
        if graph_task_id() != -1 and any(group.lifecycle.phase is Phase.BACKWARD for group in self.groups):
            return cast_output(self.mp_policy, output)
        if self._recursive and calls_under_way(module) > 1:
            return cast_output(self.mp_policy, output)
        self._recursive = False
        self.members_to_run.discard(module if len(self.modules) > 1 else self.modules[0])  # or a shallow copy of it
        if self.members_to_run:
            if torch.is_grad_enabled():
                watch_outputs(output, self._enter_member, self._first_node)
                output = watch_transformed(output, self._enter_member)
            return cast_output(self.mp_policy, output)
        output = self.complete_forward(output)
        if self.root.forward_root is self:
            for state in reversed(self.root.all_states):
                if state is not self and state.members_to_run:
                    state.members_to_run.clear()
                    output = state.complete_forward(output)
            self.root.end_forward()
        return output

    @property
    def outer_modes(self) -> int:
        """How many dispatch modes are there for the whole forward or backward that runs, and may see what it does."""
        in_backward = graph_task_id() != -1
        return self.root.outer_modes if in_backward or self.is_root is False else dispatch_modes()

    def complete_forward(self, output: Any) -> Any:
        """What ends the forward of all members, run or not."""
        in_backward = graph_task_id() != -1
        for group in self.groups:
            group.post_forward(self, reshard=not in_backward)
        if torch.is_grad_enabled() and self.groups:
            for group in self.groups:
                group.nodes = autograd_sequence_number() - self._first_node
            watched = watch_outputs(output, self.pre_backward, self._first_node)
            watched |= not in_backward and self._watch_left()
            output = watch_transformed(output, self.pre_backward)
            for group in self.groups if watched and not in_backward else ():
                self.root.backward_order.record(group)
        return cast_output(self.mp_policy, output)

    def _watch_left(self) -> bool:
        """Whether backward may enter by tensors that the forward left on modules: here, and in the units around."""
        if all([group.after_forward is False for group in self.groups]):
            return False
        around = (state for state in self.root.all_states if state.members_to_run and state is not self)
        return self._left.watch(self._first_node, lambda: [self.pre_backward, *(s.pre_backward for s in around)])

    def _check_summoned(self) -> None:
        """Let forward compute with what ``summon_full_params`` shows, in its dtype, where that is right.

        Raises:
            RuntimeError: it would not be, or a backward could follow, whose gradients nobody would reduce.
        """
        reason = self.summoned
        if torch.is_grad_enabled():
            reason = "a backward could follow, whose gradients would not be reduced; run it under torch.no_grad()"
        if reason:
            raise RuntimeError(
                f"{self.name or 'the root'}: forward inside summon_full_params; {reason}, or leave the context first"
            )

    def _prefetch_forward(self) -> None:
        for state in self.forward_prefetch:
            for group in state.groups:
                group.prefetch(Phase.FORWARD)
        for group in self.groups:
            following = self.root.forward_order.visit(group)  # noted in any case: others go by the whole order
            if not self.forward_prefetch and following is not None and following not in self.groups:
                for other in following.of_unit:
                    other.prefetch(Phase.FORWARD)

    def notice_added(self) -> None:
        """Take in parameters that somebody put on the modules since this was last asked."""
        if self._registrations != registrations():
            self._registrations = registrations()
            if self.unit is not None:
                self.unit.adopt_added(self)

    # ---- backward ----

    @outside_dynamo
    def pre_backward(self, grad: torch.Tensor) -> None:
        """Gather for backward, and start the gather of the groups backward meets next."""
        for group in self.groups if self.summoned is not None else ():
            group.lifecycle.refuse_lent("backward")
        root = self.root
        root.queue_end()
        root.creates_graph = torch.is_grad_enabled()
        # All of this unit's gathers go ahead of those for later.
        for group in [group for group in self.groups if group.pre_backward(not self.backward_prefetch)]:
            following = root.backward_order.visit(group)  # noted in any case, as the forward's is
            if not self.backward_prefetch and following is not None and following not in self.groups:
                for other in reversed(following.of_unit):
                    if other.options.unshard_in_backward:
                        other.prefetch(Phase.BACKWARD)
        for state in self.backward_prefetch:
            for group in reversed(state.groups):
                group.prefetch(Phase.BACKWARD)

    def _enter_member(self, grad: torch.Tensor) -> None:
        """Backward enters a member of a grouped call by itself, perhaps after others, recomputed, are done."""
        if any(group.lifecycle.phase is not Phase.FORWARD for group in self.groups):
            self.pre_backward(grad)

    def unshard_before_backward(self) -> None:
        """Show full parameters where several backwards are to come on forwards that ran and none of them may reshard.

        A pipeline that splits backward in two (zero bubble) looks on the module for the parameters to differentiate,
        before the first part and before the second, neither of which enters by the outputs.
        """
        for group in self.groups if self.root.goes_on else ():
            if group.awaits_backward:
                group.unshard_now()
                group.note_kept()

    # ---- the root ----

    def init_root(self) -> None:
        """Make this state the root of all states under its module: the first to run forward is.

        A submodule that ran before becomes part of the new root's tree.

        Raises:
            RuntimeError: this call grouped several modules, or parameters are still on the meta device.
        """
        if len(self.modules) > 1:
            raise RuntimeError(
                f"FSDP requires a single root module but got {self.modules}; call fully_shard on the module whose "
                "forward runs first as well"
            )
        states: dict[FSDPState, str] = {}
        for name, module in self.modules[0].named_modules():
            state = get_state(module)
            if state is not None:
                states[state] = f"{states[state]}, {name}" if state in states else name
        self.root.all_states = list(states)
        Finalization.refuse_below(self, states)
        for state, name in states.items():
            state.is_root = state is self
            state.root = self.root
            state.name = name
            for group in state.groups:
                group.root, group.of_unit = self.root, [group] if group.shared else state.groups
        self._name_groups()
        if not self._explains:
            self._explains = True
            hook_error(self.modules[0], self._explain_error)
            explain_at_exit(lambda: _shards(live_states()))
        self.root.limit_reductions()
        error = None
        try:
            self._prepare(list(states))
        except RuntimeError as reason:
            error = reason
        try:
            self.root.observe(error)
            if error is not None:
                raise error
        except RuntimeError:
            for state in states:
                state.is_root = None  # the next forward looks again
            raise

    @outside_dynamo
    def _explain_error(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None:
            explain(sys.exc_info()[1], lambda: _shards(self.root.all_states))

    def _prepare(self, states: list[FSDPState]) -> None:
        for state in states:
            state.notice_added()
            below = (get_state(module) for top in state.modules for module in top.modules())
            nested = any(other is not None and other is not state for other in below)
            for group in state.groups:
                group.has_units_below = nested
                group.lazy_init(in_root=group in self.groups)

    def _name_groups(self) -> None:
        # By place, not by parameter: somebody may have put others there (functional_call does).
        names: dict[Slot, tuple[int, str]] = {}
        for prefix, module in self.modules[0].named_modules():
            for name in module._parameters:
                names[Slot(module, name)] = len(names), f"{prefix}.{name}" if prefix else name
        for state in self.root.all_states:
            for group in state.groups:
                group.set_names(state.name, names)

    def _move_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Inputs on the device of the mesh, as DistributedDataParallel does for accelerators."""
        if self.device.type == "cpu":
            return args, kwargs
        return map_tensors(lambda t: t if t.device == self.device else t.to(self.device), (args, kwargs))

    # ---- names that other libraries read ----

    _pre_forward = pre_forward
    _post_forward = post_forward

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        if len(self.groups) > 1:
            raise AssertionError(
                f"Expected at most 1 param group, but got {len(self.groups)} of {self.name!r}; read _fsdp_param_groups"
            )
        return self.groups[0] if self.groups else None

    @property
    def _state_ctx(self) -> RootContext:
        return self.root

    @property
    def _comm_ctx(self) -> CommContext:
        return self.root.comm

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        return self.members_to_run

    @property
    def _is_root(self) -> bool | None:
        return self.is_root

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self.modules

    def _lazy_init(self) -> None:
        if self.is_root is None:
            self.init_root()

    def _root_post_backward_final_callback(self) -> None:
        self.root.end_backward()
