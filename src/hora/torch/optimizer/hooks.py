"""The hooks of a distributed optimizer: any torch optimizer, with gradients reduced over the ranks while backward runs.

A hook of each parameter passes its gradient on, and `step` waits for the reductions. This module implements Horovod's
behaviour: backward passes per step, `synchronize`, `skip_synchronize`, the guard of `zero_grad`, closures. A `Reducer`
sends the gradients: `PerParameterReducer` in the first step, `buckets.Buckets` once the ranks agree on an order.
`DeltaOptimizer` and `ShardedOptimizer` extend this class.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hora import engine
from hora.engine.request import Reduce, ReduceOp
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter
from hora.torch.capacity_plan import FirstSteps
from hora.torch.drift.watch import DriftSettings, DriftWatch, Named
from hora.torch.norms import check_finite
from hora.torch.optimizer.order import BucketOrder
from hora.torch.optimizer.parameters import parameters_of, unnamed
from hora.torch.optimizer.per_parameter import PerParameterReducer
from hora.torch.optimizer.reducer import ReduceOptions, Reducer
from hora.torch.optimizer.step_state import StepState
from hora.torch.optimizer.turns import register
from hora.torch.process_sets import ProcessSet

_LOOK_S = 50e-6  # between two polls of a GPU event


# In the order of creation, which is the same on all ranks.
_live: weakref.WeakValueDictionary[int, _DistributedOptimizer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _DistributedOptimizer(torch.optim.Optimizer):
    """Mixin before the user's optimizer class, so that `super()` is that class."""

    # Defaults for copies (`copy.deepcopy`): a copy is a local optimizer.
    _active = False
    _should_synchronize = True
    _fixed_groups = ""  # the setting with which parameters in the groups cannot be replaced
    _uses_buckets = True
    _base_class: type
    _step = StepState()  # never changed in place: an active optimizer has its own
    _resumed_passes: Mapping[int, int] = MappingProxyType({})  # of the step that begins with the next gradient
    _watcher: weakref.ref[Any] | None = None
    _drift: DriftWatch | None = None  # in a world or set of several

    def _distribute(
        self,
        options: ReduceOptions,
        *,
        groups: Sequence[Sequence[torch.Tensor]],
        backward_passes_per_step: int,
        drift: DriftSettings | None = None,
    ) -> None:
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._options = options
        self._groups = groups
        self._drift_settings = drift or DriftSettings()
        self._parameter_names = options.names
        self._hooked: list[torch.Tensor] = []
        self._known: list[torch.Tensor] = []  # when hooks were registered
        self._last_arrivals: list[torch.Tensor] = []
        self._hooks_of: dict[
            int, tuple[dict[int, Any], int]
        ] = {}  # a parameter's hooks, and the key of this optimizer's
        self.op = options.op
        self.gradient_predivide_factor = options.gradient_predivide_factor
        self.process_set = options.process_set
        self._runtime = engine.current_runtime()
        self._active = takes_part(options.process_set)
        meter.restart_step()
        self._replace_earlier()
        if self._active:
            # A fused step would let a GradScaler look for infinities in gradients that are not reduced yet.
            self._step_supports_amp_scaling = False
            self._register_hooks()
            _live[next(_numbers)] = self
            if self._runtime.config.plan:
                self.register_step_post_hook(FirstSteps())

    def _replace_earlier(self) -> None:
        """Detach an earlier optimizer of these parameters: a cell of a notebook was run again."""
        mine = set(parameters_of(self))
        for number, earlier in list(_live.items()):
            if not mine.isdisjoint(earlier._hooked):
                del _live[number]
                earlier._let_go()

    def _let_go(self) -> None:
        """Leave the parameters to a later optimizer."""
        self.remove_hooks()

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        self._known = parameters_of(self)
        for gone in self._requires_update.difference(self._known):
            del self._parameter_names[gone]
            hooks, mine = self._hooks_of.pop(id(gone))
            hooks.pop(mine, None)
        self._hooked = [parameter for parameter in self._hooked if id(parameter) in self._hooks_of]
        register(self, [self._parameter_names[p] for p in [*self._hooked, *self._thawed()]])
        # Weak, so that a dropped optimizer stops reducing although its parameters keep the hooks alive.
        myself = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            optimizer = myself()
            if optimizer is not None:
                optimizer._gradient_accumulated(parameter)

        for parameter in self._thawed():
            self._hooked.append(parameter)
            handle = parameter.register_post_accumulate_grad_hook(hook)
            self._hooks_of[id(parameter)] = handle.hooks_dict_ref() or {}, handle.id
        self._start_over()

    def remove_hooks(self) -> None:
        """Reduce no gradients during backward any more, only in `synchronize`."""
        for hooks, mine in self._hooks_of.values():
            hooks.pop(mine, None)

    def _start_over(self) -> None:
        """Forget reductions and agreements after a change of the world or of the parameters.

        Whole gradients stay reduced in their world.
        """
        stays = self._step.reduced == "whole" and self._runtime is engine.current_runtime()
        self._runtime = engine.current_runtime()
        self._reducer: Reducer = PerParameterReducer(self._options, self._hooked, self._groups)
        wanted = self._uses_buckets and not self._groups
        self._bucket_order = BucketOrder(self._options, self._hooked, wanted=wanted)
        self._drift = None
        if self._options.num_members > 1 and self._hooked:
            label = min(map(self._parameter_names.__getitem__, self._hooked))
            self._drift = DriftWatch(label, self._drift_settings, process_set_id=self._options.process_set_id)
        self._step = self._step if stays else StepState()

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """Parameters whose gradients are reduced."""
        return set(self._hooked)

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes that each parameter's gradient still waits for."""
        passes = self._step.passes
        return {parameter: self.backward_passes_per_step - passes.get(id(parameter), 0) for parameter in self._hooked}

    @property
    def _handles(self) -> dict[torch.Tensor, Reducer]:
        """Parameters whose reduction has begun."""
        return dict.fromkeys(self._step.arrived.values(), self._reducer)

    def _gradient_accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError("gradients that require a gradient themselves (create_graph=True) cannot be reduced")
        if not self._step.backward_began:
            self._begin_backward()
        passes, key = self._step.passes, id(parameter)
        num_passes = passes.get(key, 0) + 1
        if num_passes > self.backward_passes_per_step:
            raise AssertionError(
                f"the gradient of {self._parameter_names[parameter]} was computed more than backward_passes_per_step "
                "times before a call to step(); increase backward_passes_per_step (now "
                f"{self.backward_passes_per_step}) to accumulate gradients locally"
            )
        if self._step.hooked_later:  # their hooks have all run, as another gradient has arrived
            hooked_later, self._step.hooked_later = self._step.hooked_later, []
            for earlier in hooked_later:
                self._allreduce_grad_async(earlier)
        passes[key] = num_passes
        if num_passes == self.backward_passes_per_step:
            hooks, mine = self._hooks_of[key]
            if next(reversed(hooks), mine) != mine:  # later hooks may change the gradient
                self._step.hooked_later.append(parameter)
            else:
                self._allreduce_grad_async(parameter)

    def _begin_backward(self) -> None:
        """Start a step at its first gradient; the last step may have been reduced and skipped."""
        if not self._runtime.is_current:
            self._start_over()
        if self._step.reduced:
            self._step_left_out()
        self._step = StepState(
            dict(self._resumed_passes), backward_began=time.perf_counter(), blocked_s=meter.wait_s + meter.reduce_s
        )
        self._resumed_passes = {}
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None:
            watcher.step_begins()

    def _allreduce_grad_async(self, parameter: torch.Tensor) -> None:
        """Start reducing a parameter's gradient. Horovod's name: programs call it, and some override it."""
        if self._runtime.config.nan_check:
            if parameter.device.type != "cpu":
                self._step.held_back.append(parameter)
                return
            self._check_finite([parameter])
        self._hand_over(parameter)

    def _check_finite(self, parameters: list[torch.Tensor]) -> None:
        gradients = [(self._parameter_names[parameter], parameter.grad) for parameter in parameters]
        check_finite(gradients, self._runtime.world.rank)

    def _hand_over(self, parameter: torch.Tensor) -> None:
        step = self._step
        step.arrived[id(parameter)] = parameter
        self._reducer.ready(parameter)
        step.last_arrival = time.perf_counter()

    # --- steps that can be taken back ---------------------------------------------------------------------------------

    def watch_steps(self, watcher: Any) -> None:
        """Call `step_begins` and `step_ends` of an elastic state, held weakly; replaces an earlier one.

        A step begins with its first gradient. It ends once it was applied, or was reduced and skipped on all ranks.
        """
        self._watcher = weakref.ref(watcher)

    def discard_step(self) -> None:
        """Discard the current step and its gradients; this world is gone or about to be left."""
        self._step, self._resumed_passes = StepState(), {}
        for parameter in parameters_of(self):
            parameter.grad = None

    def accumulated(self) -> dict[str, Any]:
        """Return this rank's gradients of the passes since the last step, and their number; empty outside of a step.

        Gradients that are being reduced do not count: the step is about to be made.
        """
        counts = {} if self._step.arrived or self._step.reduced else self._step.passes or self._resumed_passes
        found = [(number, p) for number, p in enumerate(parameters_of(self)) if id(p) in counts]
        if not found:
            return {}
        return {"passes": {n: counts[id(p)] for n, p in found}, "gradients": {n: p.grad for n, p in found}}

    def change_worlds(self) -> None:
        """Continue accumulating in the next world."""
        kept = self.accumulated()
        self.discard_step()
        self.resume_step(kept)

    def resume_step(self, kept: Mapping[str, Any]) -> None:
        """Continue a step with what `accumulated` returned."""
        parameters = parameters_of(self)
        for number, gradient in kept.get("gradients", {}).items():
            parameters[number].grad = gradient
        self._resumed_passes = {id(parameters[number]): count for number, count in kept.get("passes", {}).items()}

    def _step_left_out(self) -> None:
        """Handle a step whose gradients were reduced but not applied."""
        self._tell_step_ended()

    def _tell_step_ended(self) -> None:
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None:
            watcher.step_ends()

    def _await_devices(self) -> None:
        """Return once the reduced gradients are on the GPUs.

        Waiting for a reduction only orders the streams. If a peer is lost meanwhile, the gradients hold no valid sum.
        """
        devices = {parameter.device for parameter in self._hooked if parameter.device.type == "cuda"}
        status = self._runtime.status
        for event in [torch.cuda.current_stream(device).record_event() for device in devices]:
            while not event.query():
                status.check_open()
                time.sleep(_LOOK_S)
        if devices:
            status.check_open()

    # --- the steps of a user's loop ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce the remaining gradients and wait; afterwards `.grad` holds the reduced gradients."""
        if self._active:
            if not self._runtime.is_current:
                self._start_over()
            changed = self._groups_changed()
            self._finish_reduction()
            self._reducer = self._bucket_order.next_reducer(self._reducer, self._last_arrivals)
            if changed or len(self._hooked) < len(self._known):  # some were frozen
                self._add_thawed()
            if self._watcher is not None:
                self._await_devices()
        self._step = StepState(reduced="whole", synchronized=True)

    def _finish_reduction(self) -> None:
        """Pass the remaining gradients to the reducer and wait."""
        step, reducer = self._step, self._reducer
        if step.backward_began:
            now = time.perf_counter()
            meter.backward_done(step.backward_began, step.last_arrival or now, now, step.blocked_s)
        if step.held_back:
            held_back, step.held_back = step.held_back, []
            self._check_finite(held_back)
            for parameter in held_back:
                self._hand_over(parameter)
        if len(step.arrived) < len(self._hooked):
            reducer.note_missing()
            for parameter in self._hooked:
                if id(parameter) not in step.arrived:
                    reducer.ready(parameter)
        self._last_arrivals = list(step.arrived.values())
        drift, is_due = self._drift, False
        if drift is not None:  # `is_due` of the watch, without a call in every step
            if drift.num_joins != self._runtime.num_joins:
                drift.restart()
            drift.num_left -= 1
            is_due = drift.num_left <= 0
        try:
            if drift is not None and is_due:
                # Now, as the others change sharded parameters once they have this rank's last bucket.
                drift.compute_digests(self.param_groups, *self._compared_tensors())
            reducer.finish()
        except HorovodInternalError as error:
            if not self._runtime.status.closing:
                raise
            # A rank has left the loop: in an earlier epoch, perhaps.
            raise HorovodInternalError(
                f"{error}; rank {self._runtime.world.rank} reduces gradients of step {meter.num_steps + 1}"
            ) from None
        finally:
            self._step = StepState()
        if drift is not None and is_due:
            drift.compare(*self._compared_tensors())

    def _compared_tensors(self) -> tuple[Named, Named]:
        """Return the parameters and buffers that should be equal on all ranks, by name."""
        names = self._parameter_names
        return [(names[parameter], parameter) for parameter in self._hooked], self._drift_settings.buffers()

    def _groups_changed(self) -> bool:
        """Return whether the user has replaced, added or removed parameters in the groups."""
        now = [p for group in self.param_groups for p in group["params"]]
        changed = len(now) != len(self._known) or any(map(operator.is_not, now, self._known))
        if changed and self._fixed_groups:
            raise ValueError(
                f"parameters of the optimizer's groups were replaced, added or removed, but {self._fixed_groups} keeps "
                "those it was made with: add new ones with optimizer.add_param_group(), or wrap the optimizer again"
            )
        return changed

    def _thawed(self) -> list[torch.Tensor]:
        """Parameters without a hook that require gradients: frozen or not there when hooks were registered."""
        return [p for p in parameters_of(self) if p.requires_grad and id(p) not in self._hooks_of]

    def _add_thawed(self) -> None:
        """Reduce the gradients of thawed and new parameters once without hooks; register hooks for later steps."""
        thawed = self._thawed()
        for number, parameter in enumerate(parameters_of(self)):
            self._parameter_names.setdefault(parameter, f"replaced.{number}")
        self._reduce_late(thawed)
        if thawed or self._groups_changed():
            self._register_hooks()

    def _reduce_late(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reduce the gradients of parameters that take part in the step only now."""
        if parameters:
            late = PerParameterReducer(self._options, parameters)
            for parameter in parameters:
                late.ready(parameter)
            late.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Skip the reduction in `step()`: for use after an explicit `synchronize()`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize (unless skipped), then run the base optimizer's step."""
        step, synchronize = self._step, self._should_synchronize
        if synchronize and step.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using the optimizer.skip_synchronize() "
                "context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        if synchronize and self._active:
            if closure is not None:
                closure = self._synchronising(closure)
            elif step.synchronized or not step.reduced:
                self.synchronize()
        try:
            result = self._base_step(closure)
        finally:
            self._step = StepState()
        if self._watcher is not None:
            self._tell_step_ended()
        return result

    # Optimizer.__init__ wraps `step` with step hooks and the profiler's range; the base class's step already has both.
    step.hooked = True  # type: ignore[attr-defined]

    def _base_step(self, closure: Callable[[], Any] | None = None) -> Any:
        began, blocked_s = time.perf_counter(), meter.wait_s + meter.reduce_s
        try:
            return super().step() if closure is None else super().step(closure)
        finally:
            if closure is None:  # a closure includes forward and backward
                meter.optimizer_s += time.perf_counter() - began - (meter.wait_s + meter.reduce_s - blocked_s)
            meter.step_done()
            if self._drift is not None:
                self._drift.applied(self.param_groups)

    def _synchronising(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        average_loss = isinstance(self, torch.optim.LBFGS)

        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            if not self._step.reduced:
                self.synchronize()
            # A line search decides by the loss: different values would make the ranks diverge.
            return self._averaged(loss) if average_loss else loss

        return synchronised

    def _averaged(self, loss: Any) -> Any:
        tensor = (
            loss.detach().clone()
            if isinstance(loss, torch.Tensor)
            else torch.tensor(float(loss), dtype=torch.float32, device="cpu")
        )
        average = Reduce(ReduceOp.AVERAGE)
        return engine.current_runtime().allreduce_(
            tensor, f"loss of {min(self._parameter_names.values())}", average, self._options.process_set_id
        )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; raises AssertionError while they are being reduced."""
        if self._backward_seen_since_step():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To leave a step out, "
                "call optimizer.synchronize() on all ranks, then optimizer.zero_grad()."
            )
        if self._step.reduced:
            self._step_left_out()
        self._step, self._resumed_passes = StepState(), {}
        super().zero_grad(*args, **kwargs)

    def _backward_seen_since_step(self) -> bool:
        """Return whether gradients are being reduced in the current world."""
        return self._step.backward_began > 0.0 and not self._world_changed()

    def _world_changed(self) -> bool:
        return engine.is_initialized() and not self._runtime.is_current

    def _make_whole(self) -> None:
        """Put the reduced gradients into `.grad` now; the next `step` neither reduces again nor warns."""
        if self._step.reduced != "whole":
            self.synchronize()
        self._step.synchronized = False

    def _complete_begun_step(self) -> None:
        """Reduce the step that has begun, so that options, groups and state can change before `step()` (collective).

        Gradients that are in buckets are scaled already: nothing else can reduce them. A step whose world has ended or
        broken will be repeated.
        """
        if self._active and self._step.arrived:
            if self._world_changed() or not self._runtime.status.is_open:
                self._start_over()
            else:
                self._make_whole()

    def _reduce_to_clip(self, parameters: Sequence[torch.Tensor]) -> Any:
        """Reduce now, as `_make_whole` does. A sharded optimizer returns its `Shards` if they have the gradients."""
        self._make_whole()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce on every `passes`-th backward pass from now on."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, but it is {passes}")
        self._complete_begun_step()
        self.backward_passes_per_step = passes
        if not self._step.reduced:
            self._step = StepState()  # passes are counted anew

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the base state; with `Compression.powersgd` also its step count, factors and this rank's residual."""
        memory = self._options.memory if self._active else None
        if memory is not None:
            self._complete_begun_step()  # until then a residual includes the gradient
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if memory is not None:
            state["powersgd"] = memory.state_dict(self._runtime.world)
        return state

    def after_broadcast(self) -> None:
        """Start over with `Compression.powersgd`: the ranks agree on steps and factors again."""
        if self._drift is not None:
            self._drift.restart()
        if self._active and self._options.memory is not None:
            self._start_over()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state and forget reductions in flight."""
        # Between steps the ranks' agreements must stay: often only one rank loads a checkpoint, and
        # broadcast_optimizer_state updates the others.
        self._complete_begun_step()
        if self._active and self._world_changed():
            self._start_over()
        memory, kept = (self._options.memory if self._active else None), state_dict.get("powersgd")
        if memory is not None and kept is not None:
            memory.load_state_dict(kept, self._runtime.world)
        self._load_in_place(state_dict, *args, **kwargs)

    def _load_in_place(self, *args: Any, **kwargs: Any) -> None:
        """Load into the same groups and state: a scheduler made with the plain optimizer changes those."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(*args, **kwargs)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        if state is not self.state:
            state.clear()
            state.update(self.state)
        self.param_groups, self.state = groups, state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose gradients are reduced too."""
        if not hasattr(self, "_parameter_names"):
            super().add_param_group(param_group)
            return
        self._complete_begun_step()
        super().add_param_group(param_group)
        group_index = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names.setdefault(parameter, unnamed(group_index, index))
        if self._active:
            added = self._thawed()
            self._register_hooks()
            if self._step.reduced:
                self._reduce_late(added)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[_DistributedOptimizer]:
    """Return the distributed optimizers that reduce a gradient of these parameters."""
    wanted = set(parameters)
    return [optimizer for optimizer in _live.values() if not wanted.isdisjoint(optimizer._hooked)]


def takes_part(process_set: ProcessSet) -> bool:
    runtime = engine.current_runtime()
    if process_set.included() is False:
        return False
    return (process_set.size() or 1) > 1 or runtime.world.elastic
