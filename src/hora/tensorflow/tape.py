"""`DistributedGradientTape`: a gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.tensorflow.compression import Compression, Compressor
from hora.tensorflow.gradients import Reduction, check_options
from hora.torch.basics import rank
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape", "local_variables"]


class _DistributedTape:
    """The methods of a distributed tape; mixed with the class of the given one, whose state it shares."""

    _reduction: Reduction
    _local: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of this variable out of the reduction."""
        self._local[id(source)] = source

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """Return the tape's own gradients, reduced over the ranks."""
        gradients = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        flat = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), self._local)
        return tf.nest.pack_sequence_as(gradients, flat)


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with the records of `gradtape` whose `gradient` reduces over the ranks."""
    if isinstance(gradtape, _DistributedTape):
        raise ValueError(f"rank {rank()}: this tape is a DistributedGradientTape already; wrap the plain one once")
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape wraps a tf.GradientTape, but it got {type(gradtape).__name__}")
    check_options(op, gradient_predivide_factor)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups instead", DeprecationWarning, stacklevel=2)
    base = type(gradtape)
    tape: Any = object.__new__(type(base.__name__, (_DistributedTape, base), {}))
    tape.__dict__ = gradtape.__dict__  # shared: what either records, both have
    tape._local = {}
    tape._reduction = Reduction(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


def PartialDistributedGradientTape(gradtape: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """Return a DistributedGradientTape that does not reduce the gradients of the variables of `local_layers`."""
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, of several, or of none."""
    if layers is None:
        return []
    if not isinstance(layers, (list, tuple, set)):
        layers = [layers]
    return [variable for layer in layers for variable in layer.trainable_weights]
