"""`DistributedOptimizer`: validates its arguments and creates a plain, a sharded or an Adasum optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch

from hora import engine
from hora.engine.request import Kind, Reduce, ReduceOp, Request
from hora.telemetry.meters import meter
from hora.torch.compression import Compression, Compressor, PowerSGD
from hora.torch.drift.buffers import buffers_beside
from hora.torch.drift.watch import DriftSettings
from hora.torch.norms import scale_all, total_norm
from hora.torch.optimizer.copies import bare_copy, copied
from hora.torch.optimizer.grad_scaler import reduce_before_unscaling
from hora.torch.optimizer.hooks import _DistributedOptimizer, optimizers_of, takes_part
from hora.torch.optimizer.order import in_common_order
from hora.torch.optimizer.parameters import parameter_groups, parameter_names, parameters_of
from hora.torch.optimizer.powersgd import PowerSGDMemory
from hora.torch.optimizer.reducer import ReduceOptions, Reducer
from hora.torch.optimizer.step_state import StepState
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import reduce_op
from hora.torch.untraced import leave_untraced


class DeltaOptimizer(_DistributedOptimizer, Reducer):
    """Mixin before the user's optimizer class, like its base class."""

    _fixed_groups = "op=hvd.Adasum"
    _uses_buckets = False
    _deltas: dict[torch.Tensor, tuple[Request, Any]]
    _states_before: dict[torch.Tensor, dict[str, Any]]  # of this step, in case it is rolled back

    def _start_over(self) -> None:
        step, same = self._step, hasattr(self, "_deltas") and self._runtime is engine.current_runtime()
        super()._start_over()
        self._reducer = self
        if same and self._runtime.status.is_open:
            self._step = step  # changes in flight do not depend on groups and options
        else:
            self._deltas, self._states_before = {}, {}

    def ready(self, parameter: torch.Tensor) -> None:
        """Step `parameter` alone, restore it, and start reducing its change."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self._watcher is not None:
            state = self.state.get(parameter, {})
            self._states_before[parameter] = {key: copied(value) for key, value in state.items()}
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        with torch.no_grad():
            start = parameter.clone()
            groups = self.param_groups
            self.param_groups = [{**group, "params": [parameter]}]
            try:
                super(_DistributedOptimizer, self).step()
            finally:
                self.param_groups = groups
            delta = (parameter - start).contiguous()
            parameter.copy_(start)
        wire, context = self._options.compression.compress(delta)
        name, reduce = self._parameter_names[parameter], Reduce(ReduceOp.ADASUM)
        request = engine.current_runtime().submit(Kind.ALLREDUCE, [wire], outputs=[wire], name=name, reduce=reduce)
        self._deltas[parameter] = (request, context)

    def finish(self) -> None:
        """Wait for all reduced changes, then apply them."""
        deltas, self._deltas = self._deltas, {}
        reduced = {parameter: request.result()[0] for parameter, (request, _) in deltas.items()}
        if self._watcher is not None:
            self._await_devices()
        with torch.no_grad():
            for parameter, (_, context) in deltas.items():
                parameter.add_(self._options.compression.decompress(reduced[parameter], context))
        self._states_before = {}
        self._tell_step_ended()

    def discard_step(self) -> None:
        """Discard the step and restore the state that was changed during backward."""
        super().discard_step()
        before, self._states_before, self._deltas = self._states_before, {}, {}
        for parameter, state in before.items():
            self.state[parameter] = state

    def synchronize(self) -> None:
        """Do nothing: `step` reduces the changes."""

    def _complete_begun_step(self) -> None:
        """Do nothing: `step` waits for the changes in flight."""

    def _make_whole(self) -> None:
        raise ValueError(
            "with op=Adasum every parameter is stepped while backward runs, so its gradient can be neither unscaled "
            "nor clipped afterwards; use op=Average"
        )

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("skipping synchronization is not supported when using the Adasum optimizer")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, wait for all ranks' changes and apply them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().synchronize()
        self._step = StepState()
        meter.step_done()
        if self._drift is not None:
            self._drift.applied(self.param_groups)
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    sharded: bool = False,
    on_drift: str = "warn",
    local: Collection[str] = (),
) -> Any:
    """Return the same optimizer (hyperparameters, groups and state kept), which reduces gradients over the ranks.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        named_parameters: `model.named_parameters()`: names for messages, and the parameters that take part.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        gradient_predivide_factor: Divide gradients by this before the sum and by size / factor after it. Only with
            `op=hvd.Average`.
        num_groups: Deprecated, as in Horovod: use `groups`.
        groups: An int: that many groups of parameters; or a list of lists: these parameters travel together.
        sparse_as_dense: Turn sparse gradients into dense ones before they are reduced.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        sharded: Shard optimizer work and state over the ranks. On one host also keep one copy of the parameters, in
            shared memory.
        on_drift: The ranks compare hyperparameters, parameters and buffers now and then. About a difference: "warn" on
            rank 0, raise an "error" on all ranks, or "ignore" it.
        local: Names of parameters and buffers that differ by intent.

    Raises:
        ValueError: The arguments do not fit one another, or the optimizer is wrapped already.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(f"{type(optimizer).__name__} is a DistributedOptimizer already; wrap the plain optimizer once")
    op = reduce_op(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError(
            f"gradient_predivide_factor ({gradient_predivide_factor}) is not supported with op {ReduceOp(op).name}, "
            "only with Average"
        )
    if gradient_predivide_factor != 1.0 and torch.version.hip is not None:
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; use groups instead", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if compression is PowerSGD:
        compression = PowerSGD()
    if isinstance(compression, PowerSGD):
        _check_powersgd(op, gradient_predivide_factor, groups)
    drift = DriftSettings(on_drift=on_drift, local=local, buffers=buffers_beside(named_parameters))
    names = parameter_names(optimizer, named_parameters)
    hooked = [p for p in parameters_of(optimizer) if p.requires_grad]
    grouped = parameter_groups(groups, hooked)
    # In an elastic world newcomers create their optimizers while the others train and would not answer.
    if isinstance(groups, int) and takes_part(process_set) and not engine.current_runtime().world.elastic:
        grouped = parameter_groups(groups, in_common_order(hooked, names, process_set))
    options = ReduceOptions(
        process_set=process_set,
        names=names,
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        memory=PowerSGDMemory(compression, names) if isinstance(compression, PowerSGD) else None,
    )
    reduce_before_unscaling()
    result = of_class(optimizer, _kind_of_optimizer(options, optimizer, grouped, sharded=sharded))
    result._distribute(options, groups=grouped, backward_passes_per_step=backward_passes_per_step, drift=drift)
    leave_untraced()  # the module of this kind of optimizer may be imported only now
    return result


def _check_powersgd(op: int, gradient_predivide_factor: float, groups: object) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"Compression.powersgd reduces with Average or Sum, but op is {ReduceOp(op).name}")
    if gradient_predivide_factor != 1.0:
        raise ValueError(
            f"Compression.powersgd needs gradient_predivide_factor=1.0, but it is {gradient_predivide_factor}"
        )
    if groups is not None:
        raise ValueError("Compression.powersgd arranges gradients by itself; leave groups and num_groups out")


def _kind_of_optimizer(
    options: ReduceOptions, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]], *, sharded: bool
) -> type:
    if sharded:
        from hora.torch.sharded.optimizer import ShardedOptimizer, check_shardable

        check_shardable(options, optimizer, groups)
        return ShardedOptimizer
    if options.op == ReduceOp.ADASUM:
        if options.process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet")
        world = engine.current_runtime().world
        if world.size > 1 or world.elastic:
            return DeltaOptimizer
    return _DistributedOptimizer


def of_class(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """Return an object of a new class that shares groups and state with `optimizer`; no constructor runs."""
    base = type(optimizer)
    names = {"__module__": "horovod.torch.optimizer", "__qualname__": base.__qualname__, "_base_class": base}
    return bare_copy(optimizer, type(base.__name__, (mixin, base), names))


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their total norm is at most `max_norm`; returns the norm before scaling.

    `parameters` may be an optimizer. Pending gradients of a `DistributedOptimizer` are reduced first, and the following
    `step()` does not reduce them again. `foreach` exists for torch's signature and is ignored.

    Args:
        parameters: The model's parameters, in any of the forms that torch takes.
        max_norm: The norm above which gradients are scaled down.
        norm_type: As of `torch.nn.utils.clip_grad_norm_`: 2 for the Euclidean norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite.
        foreach: As of `torch.nn.utils.clip_grad_norm_`.
    """
    if isinstance(parameters, torch.optim.Optimizer):
        parameters = parameters_of(parameters)
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    norm_type = float(norm_type)
    reduced = {owner: owner._reduce_to_clip(parameters) for owner in optimizers_of(parameters)}
    sharded = {owner: shards for owner, shards in reduced.items() if shards is not None}
    norms = [shards.gradient_norm(norm_type) for shards in sharded.values()]
    in_shards = {p for owner in sharded for p in owner._requires_update}
    gradients = [p.grad.detach() for p in parameters if p not in in_shards and p.grad is not None]
    if gradients or not norms:
        norms.append(total_norm(gradients, norm_type))
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scale_all(gradients, factor)
    for shards in sharded.values():
        shards.scale_gradients(factor)
    return total
