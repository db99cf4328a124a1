"""The Adasum optimizer: each parameter is stepped locally, and the changes are combined by Adasum, not the gradients.

Chosen by `DistributedOptimizer(op=Adasum)` with more than one rank. When a parameter's gradient is complete the base
optimizer steps that parameter alone; its change is reduced while backward goes on; `step` applies the reduced changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hora import engine
from hora.engine.request import Kind, Reduce, ReduceOp
from hora.torch.optimizer.base import StepState, _DistributedOptimizer

__all__ = ["DeltaOptimizer"]


class DeltaOptimizer(_DistributedOptimizer):
    """Mixed in before the user's optimizer class, like the class it extends."""

    _deltas: dict[torch.Tensor, tuple[int, Any]]
    _states_before: dict[torch.Tensor, dict[str, Any]]  # this step's, if it may have to be taken back

    def _register_hooks(self) -> None:
        self._deltas, self._states_before = {}, {}
        super()._register_hooks()
        for parameter in self._hooked:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _start_over(self) -> None:
        super()._start_over()
        self._deltas, self._states_before = {}, {}
        self._reducer = self
        self._bucket_order.possible = False

    def ready(self, parameter: torch.Tensor) -> None:
        """Step `parameter` alone and start reducing its change; the parameter itself is put back."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self._watcher is not None:
            self._states_before[parameter] = _copied(self.state.get(parameter, {}))
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        with torch.no_grad():
            start = parameter.clone()
            groups = self.param_groups
            self.param_groups = [{**group, "params": [parameter]}]
            try:
                self._base_step()
            finally:
                self.param_groups = groups
            delta = (parameter - start).contiguous()
            parameter.copy_(start)
        wire, context = self._options.compression.compress(delta)
        name, reduce = self._parameter_names[parameter], Reduce(ReduceOp.ADASUM)
        handle = engine.current_runtime().submit(Kind.ALLREDUCE, [wire], outputs=[wire], name=name, reduce=reduce)
        self._deltas[parameter] = (handle, context)

    def finish(self) -> None:
        """Wait for the reduced changes, and apply them when all are there."""
        deltas, self._deltas = self._deltas, {}
        runtime = engine.current_runtime()
        reduced = {parameter: runtime.synchronize(handle)[0] for parameter, (handle, _) in deltas.items()}
        if self._watcher is not None:
            self._await_devices()
        with torch.no_grad():
            for parameter, (_, context) in deltas.items():
                parameter.add_(self._options.compression.decompress(reduced[parameter], context))
        self._states_before = {}
        self._tell_step_ended()

    def discard_step(self) -> None:
        """The base one; and the state that was changed while backward ran is as it was before."""
        super().discard_step()
        before, self._states_before, self._deltas = self._states_before, {}, {}
        for parameter, state in before.items():
            self.state[parameter] = state

    def note_missing(self) -> None:
        """Nothing to arrange: changes travel one by one."""

    def synchronize(self) -> None:
        """Nothing to do: the changes are reduced by `step`."""

    def _make_whole(self) -> None:
        raise ValueError(
            "with op=Adasum every parameter is stepped while backward runs, so its gradient can be neither unscaled "
            "nor clipped afterwards; use op=Average"
        )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("skipping synchronization is not supported when using the Adasum optimizer")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, wait for all ranks' changes and apply them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().synchronize()
        self._step = StepState()
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
