"""Aggregation of the gradients of a Keras optimizer on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hora.keras.drift import StartCheck
from hora.keras.hyperparameters import compared_numbers
from hora.tensorflow.drift import Comparisons, settings_for
from hora.tensorflow.gradients import Aggregation, GradientReduction
from hora.torch.basics import rank


class TensorFlowAggregation(Aggregation):
    """Accumulates gradients over `passes` calls, then reduces them over the ranks and updates."""

    def __init__(self, options: dict[str, Any], passes: int, average: bool, scale_local: bool, on_drift: str) -> None:
        reduction = GradientReduction(**options, scale_local_gradients=scale_local)
        super().__init__(reduction, passes, average, self._due)
        self.process_set = reduction.process_set
        self._check = StartCheck(self.process_set, on_drift)
        self._comparisons = Comparisons(settings_for(on_drift), self.process_set, self._numbers)

    def __call__(self, optimizer: Any, gradients: list[Any], variables: list[Any], update: Any) -> Any:
        """Take the gradients of one call; calls `update(gradients, variables)` once the step is complete."""
        ready = self.compute_gradients(gradients, variables)
        return self.update(optimizer, ready, variables, lambda: update(ready, variables))

    def update(self, optimizer: Any, gradients: Sequence[Any], variables: list[Any], update: Callable[[], Any]) -> Any:
        """Call `update`, or only count the call if it does not complete a step."""
        if self.helper is None:
            return update()
        with tf.init_scope():  # create the optimizer's variables, which a branch of a function could not do
            if not getattr(optimizer, "built", False) and hasattr(optimizer, "build"):
                optimizer.build(variables)
            elif hasattr(optimizer, "_create_all_weights"):  # optimizers of tf_keras.optimizers.legacy
                optimizer._create_all_weights(variables)
        return self.apply_gradients(gradients, update, lambda: optimizer.iterations.assign_add(1))

    def check_one_pass(self) -> None:
        """Raise ValueError if a step has several calls."""
        if self.helper is not None:
            raise ValueError(
                f"rank {rank()}: with backward_passes_per_step={self.backward_passes_per_step} wrap the "
                "LossScaleOptimizer itself: hvd.DistributedOptimizer(LossScaleOptimizer(optimizer), "
                "backward_passes_per_step=…)"
            )

    def _numbers(self) -> dict[str, float]:
        return compared_numbers(self._owner())

    def _due(self, variables: Sequence[Any], name: str) -> Callable[..., None] | None:
        """Return the comparison that is due: of the beginning, or of ranks that began with the same variables."""
        due = self._check(variables)
        return self._comparisons.due(variables, name) if self._check.agreed else due
