"""`DistributedOptimizer(..., sharded=True)`: every rank steps a slice of the parameters with a slice of the state.

On one host, parameters and optimizer state lie once in shared memory. Across hosts and on GPUs, gradients are
reduce-scattered and parameters all-gathered. Works only for optimizers that treat elements independently. The first
step reduces whole gradients; then the members agree on a layout (`shards.Shards`) in the order in which gradients
arrived.

Between backward and `synchronize()` a parameter's `.grad` is None. Gradients are whole only after an explicit
`synchronize()`, which costs as much as the unsharded reduction; `step()` and `hora.torch.clip_grad_norm_` do not need
it.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.engine.shm.segment import SharedMemory
from hora.memory import give_back_freed_memory
from hora.telemetry.meters import meter
from hora.torch.compression import Compression, wire_dtype
from hora.torch.optimizer.bucket_plan import plan_buckets, view_like
from hora.torch.optimizer.copies import bare_copy, bare_step, copied
from hora.torch.optimizer.hooks import _DistributedOptimizer
from hora.torch.optimizer.order import AgreedOrder, agree_on_order
from hora.torch.optimizer.reducer import ReduceOptions
from hora.torch.optimizer.step_state import StepState
from hora.torch.optimizer.turns import turn
from hora.torch.sharded.shards import ShardBucket, Shards, is_used_elsewhere
from hora.torch.sharded.state import VALUES, Place, ShardState, kinds_of

# (member, number of steps) -> its elements
Slices = dict[tuple[int, int], dict[Place, torch.Tensor]]
# Values and state of whole parameters.
_Whole = tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, dict[str, Any]]]
# The tests compare each with its unsharded counterpart.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class SliceCopies:
    """Copies of this rank's slices and, without shared memory, of another rank's. Counts steps of this world."""

    def __init__(self, shards: Shards, state: ShardState, memory: SharedMemory | None) -> None:
        self.shards, self._state = shards, state
        self._begun = self._ended = 0
        self._kinds: list[dict[str, Any]] | None = None  # of the state, before the current step
        self._apart: Slices = {}
        self._copies: dict[Place, torch.Tensor] = {}
        self._all_begun: torch.Tensor | None = None
        if memory is not None:
            self._all_begun = memory.allocate(shards.num_members, torch.int64)
            for place, dtype in state.entries.items():
                self._copies[place] = memory.allocate(state.specs[place[0]].num_elements, dtype)

    # --- while all goes well --------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Copy this rank's slices. In the first step the optimizer still has them whole."""
        if self._begun:
            self._kinds = self._state.kinds()
            if self._all_begun is None:
                self._apart[self.shards.member, self._ended] = self._mine()
            else:
                for place, part in self._state.slices.items():
                    self._copies[place][self.shards.buckets[place[0]].part] = part
        self._begun += 1
        if self._all_begun is not None:
            self._all_begun[self.shards.member] = self._begun

    def after_step(self) -> None:
        """Send this rank's slices to another rank unless they are shared (collective)."""
        if self._all_begun is not None or self.shards.num_members == 1:
            return
        shards, mine = self.shards, self._state.slices
        payload = torch.cat([part.contiguous().view(torch.uint8) for part in mine.values()])
        size, most = shards.num_members, max(len(host) for host in shards.runtime.hosts)
        away = most if most < size else 1  # to a rank on another host, if there are several
        splits = [0] * size
        splits[(shards.member + away) % size] = len(payload)
        request = shards.runtime.submit(
            Kind.ALLTOALL, [payload], name=f"copies.{shards.buckets[0].spec.name}", splits=splits
        )
        received = request.result()[0]
        sizes = [part.nbytes for part in mine.values()]
        parts = zip(mine.items(), received.split(sizes), strict=True)
        copy = {place: piece.clone().view(part.dtype) for (place, part), piece in parts}
        self._apart[(shards.member - away) % size, self._begun] = copy

    def step_ended(self) -> None:
        """Drop the copies from before the step: all ranks have stepped."""
        self._ended = self._begun
        self._kinds = None
        self._apart = {(member, number): its for (member, number), its in self._apart.items() if number == self._ended}

    # --- when the world has broken --------------------------------------------------------------------------------

    def slices(self) -> Slices:
        """Return everything that other ranks cannot read by themselves, on the CPU."""
        if self._all_begun is not None:
            return {}
        everything = {**self._apart, (self.shards.member, self._begun): self._mine()}
        return {which: {place: part.cpu() for place, part in its.items()} for which, its in everything.items()}

    def united(self, slices: Slices) -> _Whole:
        """Return the whole parameters and their state after the last step that ended here. `slices`: of all ranks.

        With shared memory, call this only once the survivors have met again: by then they no longer write to it.
        """
        kinds = self._kinds if self._kinds is not None else self._state.kinds()
        values: dict[torch.Tensor, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for index, spec in enumerate(self._state.specs):
            flats = {key: self._whole((i, key), slices) for i, key in self._state.entries if i == index}
            for offset, parameter in zip(spec.offsets, spec.parameters, strict=True):
                views = {key: view_like(flat, offset, parameter).clone() for key, flat in flats.items()}
                values[parameter] = views.pop(VALUES)
                its = kinds[self._state.parameter_kinds.of[parameter]]
                state[parameter] = {  # an entry that the lost step made first has no copy
                    key: views[key] if value is ... else copied(value)
                    for key, value in its.items()
                    if value is not ... or key in views
                }
        return values, state

    def _whole(self, place: Place, slices: Slices) -> torch.Tensor:
        size, bucket = self.shards.num_members, self.shards.buckets[place[0]]
        if self._all_begun is not None:
            whole = self._state.flats[place].clone()
            parts = whole.chunk(size), self._copies[place].chunk(size)
            # Read after the copy: a rank that was dropped may have begun to write in between.
            for begun, part, copy in zip(self._all_begun.tolist(), *parts, strict=True):
                if begun > self._ended:
                    part.copy_(copy)
            return whole
        lost = [member for member in range(size) if (member, self._ended) not in slices]
        if lost:
            raise RuntimeError(
                f"the slices of ranks {lost} of the sharded optimizer are lost: the ranks with their copies "
                "died as well. Start the job again; with state.persist() and per_step=False it continues from the last "
                "commit on disk"
            )
        found = [slices[member, self._ended][place] for member in range(size)]
        return torch.cat(found).to(bucket.values.device)

    def _mine(self) -> dict[Place, torch.Tensor]:
        return {place: part.clone() for place, part in self._state.slices.items()}


def check_shardable(
    options: ReduceOptions, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Raise ValueError if the optimizer cannot be sharded."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            "sharded=True needs an optimizer that treats every element by itself, but "
            f"{kind.__module__}.{kind.__name__} may not; use one of torch.optim's {', '.join(ELEMENTWISE)}, "
            "or sharded=False"
        )
    if options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"sharded=True reduces with Average or Sum, but op is {ReduceOp(options.op).name}")
    if options.compression not in (Compression.none, Compression.fp16, Compression.bf16):
        raise ValueError("sharded=True supports Compression.none, fp16 and bf16; use one of them, or sharded=False")
    if groups:
        raise ValueError("sharded=True arranges gradients by itself; leave groups and num_groups out")


_MAX_TRACE_BYTES = 2**16


class _Trace:
    """One parameter's gradient, left in place after each step to notice a program that does not clear gradients.

    A sharded step keeps no whole gradients that a backward pass could add to, or that a second step could use again.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self._parameter, self._name, self._gradient = parameter, name, parameter.grad
        self._version = -1
        self._is_added_to = False
        self._handle = parameter.register_hook(self._before_accumulation)

    def leave(self) -> None:
        """Put the gradient into its place after a step: a large one, whose memory counts, after the first step only."""
        gradient = self._gradient
        if gradient is None or (self._version >= 0 and gradient.nbytes > _MAX_TRACE_BYTES):
            self.remove()
            give_back_freed_memory()
            return
        if gradient._version != self._version and not (self._version < 0 and gradient.any()):
            gradient.fill_(1.0)  # no zeros: those would look cleared
        self._parameter.grad, self._version, self._is_added_to = gradient, gradient._version, False

    def check(self) -> None:
        """Raise ValueError in a step if the gradients of the last one still were there."""
        if self._is_added_to or self._remains():
            raise ValueError(
                f"the gradient of {self._name} was not cleared after the step before; sharded=True keeps no whole "
                "gradients that another backward pass could add to, or another step() use again. Call "
                "optimizer.zero_grad() before each step's first backward pass and step() once after it, or use "
                "sharded=False"
            )

    def remove(self) -> None:
        """Forget the gradient."""
        self._handle.remove()
        if self._parameter.grad is self._gradient:
            self._parameter.grad = None
        self._gradient = None

    def _before_accumulation(self, _: torch.Tensor) -> None:
        gradient = self._gradient
        if gradient is None or self._parameter.grad is not gradient:
            self._is_added_to = False
        elif gradient._version == self._version:  # the first pass since the step
            self._is_added_to = self._remains()

    def _remains(self) -> bool:
        gradient = self._gradient
        if gradient is None or self._parameter.grad is not gradient or gradient._version != self._version:
            return False
        return bool(gradient.any())  # `grad.data.zero_()` clears without a new version


class ShardedOptimizer(_DistributedOptimizer):
    """Mixin before the user's optimizer class, like its base class."""

    _fixed_groups = "sharded=True"
    _uses_buckets = False
    _shards: Shards | None = None
    _shard_state: ShardState
    _inner: Any = None
    _copies: SliceCopies | None = None  # with a step watcher, like the next
    _before: _Whole | None = None  # until the first step has ended
    _trace: _Trace | None = None  # once sharded

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters and state are sharded already, which happens in the first step."""
        return self._shards is not None

    # --- reduction ------------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        shards = self._shards
        if shards is not None:
            if self._runtime is engine.current_runtime() or shards.shared:
                self._shard_state.unite()
            else:
                warnings.warn(
                    "the world changed and its slices of the optimizer state are lost; load a saved state", stacklevel=2
                )
            self.leave_world()
        super()._start_over()

    def _reduce_slices(self) -> None:
        """Reduce the remaining gradients and wait for this rank's slices."""
        if not self._step.reduced:
            self._finish_reduction()
            self._step.reduced = "slices"

    def _materialise(self) -> None:
        """Write the whole reduced gradients to `.grad` on every rank."""
        assert self._shards is not None
        self._shards.materialise()
        self._step.reduced = "whole"

    def synchronize(self) -> None:
        """Reduce as the unsharded optimizer does: afterwards `.grad` holds the whole gradients on every rank."""
        if self._active and engine.current_runtime() is not self._runtime:
            self._start_over()
        if self._shards is None:
            super().synchronize()
            return
        self._reduce_slices()
        if self._step.reduced == "slices":
            self._materialise()
            self._add_thawed()
        self._step = StepState(reduced="whole", synchronized=True)

    def _reduce_to_clip(self, parameters: Sequence[torch.Tensor]) -> Shards | None:
        if self._shards is None:
            self._make_whole()
            return None
        self._reduce_slices()
        self._step.synchronized = False
        if self._step.reduced == "slices" and not set(parameters).issuperset(self._hooked):
            self._materialise()  # only some are clipped: use whole gradients
        return self._shards if self._step.reduced == "slices" else None

    # --- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce (if needed), step this rank's slice, and send it to all ranks."""
        if not self._active:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.current_runtime() is not self._runtime:
            self._start_over()
        self._reduce_for_step()
        if self._step.reduced == "slices" and (self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
            self._materialise()  # hooks may read and change gradients
        are_whole = self._step.reduced == "whole"
        self._step = StepState()
        is_first = self._shards is None
        if is_first and self._watcher is not None:
            self._before = {p: p.data for p in self._hooked}, dict(self.state)
        if is_first and not self._shard():
            self._base_step()  # a rank has joined: step unsharded now, and try again in the next step
            self._step_ended()
            return loss
        assert self._shards is not None
        smallest = min(self._last_arrivals, key=torch.Tensor.numel, default=None) if is_first else None
        if smallest is not None and smallest.grad is not None:
            self._trace = _Trace(smallest, self._parameter_names[smallest])
        self._step_slices(are_whole)
        self._step_ended()
        if self._shard_state.gather_new():
            self._start_over()
        elif self._trace is not None:
            self._trace.leave()
        if is_first:
            give_back_freed_memory()  # private parameters, state and whole gradients
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _step_slices(self, are_whole: bool) -> None:
        """Run the user's step hooks and, between them, step this rank's slice. `are_whole`: the gradients."""
        assert self._shards is not None
        if are_whole:
            self._shards.load_whole()
        self._inner_step()

    def _reduce_for_step(self) -> None:
        if self._should_synchronize and self._step.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "The gradients are not reduced again.",
                stacklevel=3,
            )
        some_frozen = len(self._hooked) < len(self._known)
        changed = self._should_synchronize and (self._groups_changed() or bool(some_frozen and self._thawed()))
        if self._trace is not None and (self._should_synchronize or self._step.reduced):
            self._trace.check()
        if changed:
            self.synchronize()
        if self._step.reduced:
            # Gradients were reduced before this call: other ranks may still read the parameters.
            if self._shards is not None:
                self._shards.meet()
        elif not self._should_synchronize:
            raise AssertionError("a sharded optimizer cannot step without synchronize(): no rank has whole gradients")
        elif self._shards is None:
            super().synchronize()
        else:
            self._reduce_slices()

    def _inner_step(self) -> None:
        shards, inner = self._shards, self._inner
        assert shards is not None
        for mine, origin in zip(inner.param_groups, self._shard_state.parameter_kinds.groups, strict=True):
            members = mine["params"]
            mine.update(self.param_groups[origin])  # changes by schedulers and users
            mine["params"] = members
        began = time.perf_counter()
        moved = shards.load_moved(self._parameter_names)
        if self._copies is not None:
            self._copies.before_step()
        bare_step(inner, self._base_class)
        meter.optimizer_s += time.perf_counter() - began
        self._shard_state.adopt()
        if self._copies is not None:
            self._copies.after_step()
        shards.publish()
        if moved:
            self._note_replaced(moved)
            shards.give_back(moved)
        meter.step_done()
        if self._drift is not None:
            self._drift.applied(self.param_groups)

    def _note_replaced(self, moved: Sequence[tuple[ShardBucket, int]]) -> None:
        """Have the ranks compare which parameters were given other memory, but for memory that one rank shares."""
        if self._drift is not None:
            for bucket, index in moved:
                parameter = bucket.spec.parameters[index]
                if not is_used_elsewhere(parameter):
                    self._drift.replaced(self._parameter_names[parameter])

    def _step_ended(self) -> None:
        self._before = None
        if self._copies is not None:
            self._copies.step_ended()
        self._tell_step_ended()

    # --- from whole to sharded and back ---------------------------------------------------------------------------

    def _shard(self) -> bool:
        """Agree on a layout and move parameters and state into it (collective); False if a member took no part."""
        hooked = self._hooked
        for parameter in hooked:
            if parameter.grad is not None and parameter.grad.is_sparse:
                name = self._parameter_names[parameter]
                raise ValueError(
                    f"sharded=True does not support sparse gradients, but {name} has one; use sharded=False"
                )
        with turn(self._options, hooked):
            order = agree_on_order(self._options, hooked, self._last_arrivals, set())
            if order is not None and hooked:
                self._lay_out(order, hooked)
        return self._shards is not None

    def _lay_out(self, order: AgreedOrder, hooked: Sequence[torch.Tensor]) -> None:
        kinds = kinds_of(self, hooked)
        size = self._options.num_members
        specs = plan_buckets(
            order.parameters,
            self._parameter_names,
            wire_dtype=wire_dtype(self._options.compression),
            group_of=kinds.of.__getitem__,
            granularity=64 * size,
            label=order.label,
        )
        state = ShardState(self, specs, kinds)
        memory = None
        if all(p.device.type == "cpu" for p in hooked):
            num_bytes = Shards.num_bytes(specs, size) + state.num_bytes()
            if self._watcher is not None:
                num_bytes += state.num_bytes() + SharedMemory.space(size, torch.int64)  # of `SliceCopies`
            memory = self._runtime.sets.shared_memory(self._options.process_set_id, num_bytes)
        shards = Shards(self._runtime, self._options, specs, kinds.of.__getitem__, memory)
        inner = bare_copy(self, self._base_class)
        inner.state, inner._before = defaultdict(dict), None
        inner.param_groups = shards.inner_groups([self.param_groups[group] for group in kinds.groups])
        state.divide(shards, inner, memory)
        self._copies = None if self._watcher is None else SliceCopies(shards, state, memory)
        self._shards, self._shard_state, self._inner, self._reducer = shards, state, inner, shards

    def _let_go(self) -> None:
        super()._let_go()
        if self._shards is not None and self._shards.shared:
            self._shard_state.unite()
        self.leave_world()

    def leave_world(self) -> None:
        """Go back to private whole parameters, to be loaded again: other ranks' slices are gone."""
        shards = self._shards
        if shards is None:
            return
        shards.let_go()
        shards.release()
        self._drop_trace()
        self._shards = self._inner = self._copies = None

    def _drop_trace(self) -> None:
        if self._trace is not None:
            self._trace.remove()
            self._trace = None

    # --- steps that can be taken back -----------------------------------------------------------------------------

    def watch_steps(self, watcher: Any) -> None:
        super().watch_steps(watcher)
        if self._shards is not None and self._copies is None:
            self._start_over()  # sharded without copies: do it again with them

    @property
    def has_slices_apart(self) -> bool:
        """Return whether no rank can read the whole state by itself."""
        return self._copies is not None and not self._copies.shards.shared

    def slices(self) -> Slices:
        """Return this rank's slices of a world that is gone; `unite` assembles those of all ranks."""
        return {} if self._copies is None or self._before is not None else self._copies.slices()

    def unite(self, slices: Slices) -> None:
        """Restore private whole parameters and state after the last step that ended here, from all ranks' slices."""
        if self._before is not None:  # nothing was sharded yet
            values, state = self._before
        elif self._copies is not None:
            values, state = self._copies.united(slices)
        else:
            return
        if self._shards is not None:
            self._shards.release()
        self._drop_trace()
        self._shards = self._inner = self._copies = self._before = None
        for parameter, value in values.items():
            parameter.data = value
            self.state.pop(parameter, None)
        self.state.update({parameter: its for parameter, its in state.items() if its})
        self._start_over()

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the whole state, as an unsharded optimizer has it.

        With shared memory any rank may call this alone between its steps; otherwise all ranks must call it.
        """
        if self._shards is not None:
            self._shard_state.present()
        return super().state_dict(*args, **kwargs)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook, on all ranks: it sees whole gradients, which the ranks gather in every step from now on."""
        return super().register_step_pre_hook(hook)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a whole state, saved by any number of ranks or by a plain optimizer; call it on all ranks."""
        if self._shards is None or self._runtime is not engine.current_runtime():
            super().load_state_dict(*args, **kwargs)
            return
        self._complete_begun_step()
        self._load_in_place(*args, **kwargs)
        if self._shards is None:  # a broken world
            return
        if self._shard_state.fits():
            self._shard_state.load()
        else:
            self.leave_world()  # other step counts or other entries: shard again in the next step
            self._start_over()
