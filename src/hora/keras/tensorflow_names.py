"""Names of `horovod.tensorflow` that need Keras: a layer, and the optimizer, which may be one of `tf.compat.v1`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.keras import optimizer as keras_optimizer
from hora.tensorflow.compression import Compression
from hora.tensorflow.gradients import GradientReduction, GraphOptimizer
from hora.tensorflow.ops import allreduce
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average, Sum

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "SyncBatchNormalization"]
SyncBatchNormalization: Any  # of `__getattr__`


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    on_drift: str = "warn",
) -> Any:
    """Return the same Keras optimizer (hyperparameters and state kept) that reduces gradients over the ranks.

    An optimizer of `tf.compat.v1` is wrapped in another one, which does so in `compute_gradients`.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        use_locking: Accepted for Horovod's sake.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        device_sparse: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        sparse_as_dense: Turn sparse gradients into dense ones before they are reduced.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        gradient_predivide_factor: Divide gradients by this before the sum and by size / factor after it. Only with
            `op=hvd.Average`.
        average_aggregated_gradients: With `backward_passes_per_step` above 1: divide the accumulated gradients by that
            number.
        num_groups: Deprecated, as in Horovod: use `groups`.
        groups: An int: that many groups of parameters; or a list of lists: these parameters travel together.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        scale_local_gradients: Divide gradients that are not reduced by the number of ranks, so that all have one scale.
    """
    options = {key: value for key, value in locals().items() if key not in ("optimizer", "use_locking")}
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return keras_optimizer.DistributedOptimizer(optimizer, **options)
    reduction, passes = GradientReduction.of(options), backward_passes_per_step
    return GraphOptimizer(optimizer, name, use_locking, reduction, passes, average_aggregated_gradients, on_drift)


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """Return a DistributedOptimizer that does not reduce the gradients of the variables of `local_layers`.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """
    result = DistributedOptimizer(optimizer, *args, **kwargs)
    keras_optimizer.register_local_layers(result, local_layers)
    return result


@functools.cache
def __getattr__(name: str) -> Any:
    """Return the layer for this `tf.keras`, which is imported only when it is needed."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = tf.keras.layers.BatchNormalization
    return type("SyncBatchNormalization", (_SyncBatchNormalization, base), {"__module__": "horovod.tensorflow"})


class _SyncBatchNormalization:
    """Batch normalization with the mean and variance over the batches of all ranks."""

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True: its moments are those of all ranks")
        if kwargs.get("renorm"):
            raise ValueError("SyncBatchNormalization does not support renorm=True")
        super().__init__(**kwargs)
        if hasattr(self, "fused"):  # Keras 2, which would otherwise normalize images by a kernel of its own
            self.fused = False

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        if hasattr(parent, "_calculate_mean_and_var"):  # Keras 2, which calls it
            return parent._moments(inputs, *args, **kwargs)
        return self._calculate_mean_and_var(inputs, self._reduction_axes, False, *args, **kwargs)  # type: ignore[attr-defined]

    def _calculate_mean_and_var(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        """Return mean and variance over all ranks, of the steps that a mask selects."""
        x = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else tf.convert_to_tensor(inputs)
        axes, chosen = list(reduction_axes), tf.ones([], tf.bool)
        if mask is not None:
            chosen = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))

        def total(values: Any) -> Any:
            return tf.reduce_sum(values if mask is None else tf.where(chosen, values, 0), axes, keepdims=True)

        per_channel = tf.size(x) // tf.maximum(tf.size(total(x)), 1)
        count = tf.cast(per_channel if mask is None else tf.math.count_nonzero(mask), x.dtype)
        mean = tf.math.divide_no_nan(total(x), count)
        variance = tf.math.divide_no_nan(total(tf.square(x - mean)), count)
        # In float64, because differences of squares cancel in float32.
        mean, variance, count = (tf.cast(value, tf.float64) for value in (mean, variance, count))
        sums = tf.stack([mean, variance + mean * mean]) * count
        packed = allreduce(tf.concat([tf.reshape(sums, [-1]), [count]], 0), op=Sum)
        mean, square = tf.unstack(tf.reshape(packed[:-1] / tf.maximum(packed[-1], 1), tf.shape(sums)), num=2)
        found = mean, tf.maximum(square - mean * mean, 0)
        return tuple(tf.cast(value if keep_dims else tf.squeeze(value, axes), inputs.dtype) for value in found)
