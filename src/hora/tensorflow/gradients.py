"""Reduction of gradients over the ranks: the part that the tape and the optimizers share.

In eager mode all dense gradients are one grouped operation. Inside a `tf.function` they are cut into buckets, last
layers first, each with an operation that submits it as soon as backward has made its gradients and one that waits for
it, so that the engine reduces while backward goes on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf
import torch

import hora.torch as hvd
from hora import engine
from hora.engine.request import ReduceOp
from hora.telemetry.meters import meter
from hora.tensorflow.bridge import call, check_no_xla
from hora.tensorflow.compression import Compression, Compressor
from hora.tensorflow.ops import allreduce, function_name, grouped_allreduce, size_op
from hora.torch.optimizer.finite import check_finite
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Adasum, Average

__all__ = ["Reduction", "check_options"]

_BUCKET_BYTES = 4 * 2**20
_FLAT_BYTES = 2**20

# Names and shapes of gradients that the ranks of a runtime have found to be the same on all of them.
_compared: weakref.WeakKeyDictionary[engine.Runtime, set[Any]] = weakref.WeakKeyDictionary()


def check_options(op: int, gradient_predivide_factor: float, backward_passes_per_step: int = 1) -> None:
    """ValueError for settings that exclude one another."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor ({gradient_predivide_factor}) is not supported with op {ReduceOp(op).name}, "
            "only with Average"
        )
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, but it is {backward_passes_per_step}")


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The settings of a reduction of gradients; call it with gradients and their variables."""

    op: int = Average
    compression: type[Compressor] | Compressor = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        local: Collection[int] = (),
        first: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Return the reduced gradients; None stays None. `local`: ids of variables whose gradients are not reduced.

        `first` is called before each reduction of all gradients together.
        """
        results = list(gradients)
        if _single_process():
            return results
        if engine.current_runtime().config.nan_check:
            _check_finite(gradients, variables)
        dense = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in local:
                results[i] = self._scaled(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                results[i] = allreduce(gradient, op=self.op, process_set=self.process_set)
            else:
                results[i] = tf.convert_to_tensor(gradient)
                dense.append(i)
        for members, reduced in self._reduced(dense, results, variables, first):
            for i, gradient in zip(members, reduced, strict=True):
                results[i] = gradient
        if tf.executing_eagerly() and dense:
            meter.step_done()
        return results

    def _scaled(self, gradient: Any) -> Any:
        if not self.scale_local_gradients:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._scaled(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size_op(self.process_set.process_set_id or 0), gradient.dtype)

    def _reduced(
        self, dense: list[int], gradients: list[Any], variables: Sequence[Any], first: Callable[[], None] | None
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield positions of dense gradients and what they were reduced to."""
        if not dense:
            return
        if self.groups or tf.executing_eagerly():
            if first is not None and tf.executing_eagerly():
                first()
            for members in self._grouped(dense, variables):
                yield members, self._grouped_allreduce([gradients[i] for i in members])
            return
        dense = dense[::-1]  # backward makes the gradients of the last layers first

        def overlapped(*tensors: Any) -> Any:
            return self._overlapped(tensors, first)

        yield dense, list(tf.custom_gradient(overlapped)(*[gradients[i] for i in dense]))

    def _grouped_allreduce(self, gradients: Sequence[Any]) -> list[Any]:
        factor = self.gradient_predivide_factor
        return grouped_allreduce(
            gradients,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )

    def _grouped(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return the positions of `dense` in groups; without groups there is one."""
        if not self.groups:
            return [dense]
        if isinstance(self.groups, int):
            size, longer = divmod(len(dense), self.groups)
            bounds = [i * size + min(i, longer) for i in range(self.groups + 1)]
            return [dense[a:b] for a, b in pairwise(bounds) if b > a]
        group_of = {id(variable): number for number, group in enumerate(self.groups) for variable in group}
        groups: dict[int, list[int]] = {}
        for i in dense:
            groups.setdefault(group_of.get(id(variables[i]), -1 - i), []).append(i)
        return list(groups.values())

    def _overlapped(self, gradients: Sequence[Any], first: Callable[[], None] | None) -> tuple[list[Any], Any]:
        check_no_xla()
        factor = self.gradient_predivide_factor
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        settings: dict[str, Any] = {"op": self.op, "prescale_factor": 1.0 / factor, "postscale_factor": factor}
        # What is equal on all ranks, and another for another function: two may run at once.
        name = f"gradients.{function_name(gradients[0])}.{gradients[0].name}"
        settings["process_set"] = self.process_set
        divided = _buckets([tensor for tensor, _ in pairs])
        if len(divided) == 1:  # nothing to overlap with
            outputs = _reduce_at_once(name, settings, divided[0], first)
        else:
            buckets = [
                _Bucket(f"{name}.{i}", settings, members, first if i == 0 else None)
                for i, members in enumerate(divided)
            ]
            tokens = [bucket.submit() for bucket in buckets]
            outputs = []
            for bucket, token in zip(buckets, tokens, strict=True):
                outputs += bucket.wait(token, last=bucket is buckets[-1])
        results = [self.compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
        return results, lambda *upstream: self._grouped_allreduce(upstream)


def _reduce_at_once(
    name: str, settings: dict[str, Any], tensors: Sequence[Any], first: Callable[[], None] | None
) -> list[Any]:
    """Reduce the gradients of a function in one operation that waits.

    Small ones travel side by side in one tensor, which costs a fraction of what handing over each of them does. Their
    shapes are compared by the ranks once, when they are first reduced.
    """
    flat = len(tensors) > 1 and _fit_side_by_side(tensors, settings["op"])
    inputs = [tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)] if flat else tensors
    shapes = [tuple(tensor.shape) for tensor in tensors] if flat else []
    key = (name, tuple(shapes))

    def work(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        if first is not None:
            first()
        compared = _compared.setdefault(engine.current_runtime(), set())
        if flat and key not in compared:
            sizes = [math.prod(shape) for shape in shapes]
            parts = [part.view(shape) for part, shape in zip(arrays[0].split(sizes), shapes, strict=True)]
            reduced = hvd.grouped_allreduce(parts, name=name, **settings)
            outputs: Sequence[torch.Tensor] = [torch.cat([part.flatten() for part in reduced])]
            compared.add(key)
        elif len(arrays) == 1:
            outputs = [hvd.allreduce(arrays[0], name=f"{name}.flat", **settings)]
        else:
            outputs = hvd.grouped_allreduce(list(arrays), name=name, **settings)
        meter.step_done()
        return outputs

    outputs = call(work, inputs, [tensor.dtype for tensor in inputs], [tensor.shape for tensor in inputs])
    if not flat:
        return outputs
    parts = tf.split(outputs[0], [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _fit_side_by_side(tensors: Sequence[Any], op: int) -> bool:
    """Return whether tensors may be reduced as one: Adasum looks at each by itself."""
    if op == Adasum or len({tensor.dtype for tensor in tensors}) > 1:
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors) <= _FLAT_BYTES


class _Bucket:
    """Gradients of a function that travel together: one operation submits them and another waits."""

    def __init__(
        self, name: str, settings: dict[str, Any], tensors: Sequence[Any], first: Callable[[], None] | None
    ) -> None:
        self._name, self._settings, self._tensors, self._first = name, settings, tensors, first
        self._in_flight: tuple[object, int] | None = None

    def submit(self) -> Any:
        return call(self._submit, self._tensors, [tf.int32], [[]])[0]

    def wait(self, token: Any, *, last: bool) -> list[Any]:
        def work(_: torch.Tensor) -> Sequence[torch.Tensor]:
            outputs = self._wait()
            if last:
                meter.step_done()
            return outputs

        return call(work, [token], [t.dtype for t in self._tensors], [t.shape for t in self._tensors])

    def _submit(self, *arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._in_flight is not None:  # an operation of the last call failed between submitting and waiting
            if self._in_flight[0] is engine.current_runtime():
                self._wait()
            self._in_flight = None
        if self._first is not None:
            self._first()
        handle = hvd.grouped_allreduce_async(list(arrays), name=self._name, **self._settings)
        self._in_flight = (engine.current_runtime(), handle)
        return [torch.zeros((), dtype=torch.int32, device="cpu")]

    def _wait(self) -> Sequence[torch.Tensor]:
        assert self._in_flight is not None
        _, handle = self._in_flight
        self._in_flight = None
        outputs = hvd.synchronize(handle)
        if outputs is None:
            raise hvd.HorovodInternalError("Horovod has been shut down by another thread of this process")
        return outputs


def _check_finite(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """FloatingPointError if a gradient is not finite here, before any is reduced; in a function when it runs."""
    known = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    names = [str(getattr(variable, "path", getattr(variable, "name", "?"))) for _, variable in known]
    tensors = [g.values if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g, _ in known]

    def work(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        check_finite(zip(names, arrays, strict=True), hvd.rank())
        return [torch.zeros((), dtype=torch.int32, device="cpu")]

    call(work, tensors, [tf.int32], [[]])


def _buckets(tensors: Sequence[Any]) -> list[list[Any]]:
    """Cut tensors into runs of at least `_BUCKET_BYTES`; one of unknown shape counts as nothing."""
    buckets: list[list[Any]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return buckets


def _single_process() -> bool:
    """Return whether this process is, and will be, the only one."""
    world = engine.current_runtime().world
    return world.size == 1 and not world.elastic
