"""Reduction of gradients over the ranks: the part that the tape and the optimizers share.

In eager mode all dense gradients are one grouped operation. In a graph they are cut into buckets, last layers first,
each with an operation that submits it as soon as backward has made its gradients, so that the engine reduces while
backward goes on.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf
import torch

import hora.torch as hvd
from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter
from hora.tensorflow.bridge import call, carry_out, check_no_xla
from hora.tensorflow.compression import Compression, Compressor
from hora.tensorflow.ops import allreduce, grouped_allreduce, size_op
from hora.torch.collective import Collective
from hora.torch.optimizer.finite import check_finite
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import Adasum, Average

__all__ = ["First", "Reduction", "check_options"]

_BUCKET_BYTES = 4 * 2**20
_FLAT_BYTES = 2**20

# Asked before each reduction of all gradients together: returns what has to be done first and waits for other ranks.
First = Callable[[], Callable[[], None] | None]

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
        first: First | None = None,
    ) -> list[Any]:
        """Return the reduced gradients; None stays None. `local`: ids of variables whose gradients are not reduced.

        Ranks outside of the process set keep theirs.
        """
        results = list(gradients)
        if _single_process() or (registered_id(self.process_set) and not self.process_set.included()):
            return results
        if engine.current_runtime().config.nan_check:
            finite = _check_finite(gradients, variables)
            with tf.control_dependencies([finite]):
                gradients = [
                    None if g is None else tf.nest.map_structure(tf.identity, g, expand_composites=True)
                    for g in gradients
                ]
            results = list(gradients)
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
        self, dense: list[int], gradients: list[Any], variables: Sequence[Any], first: First | None
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield positions of dense gradients and what they were reduced to."""
        if not dense:
            return
        if self.groups or tf.executing_eagerly():
            due = first() if first is not None and tf.executing_eagerly() else None
            if due is not None:
                due()
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

    def _overlapped(self, gradients: Sequence[Any], first: First | None) -> tuple[list[Any], Any]:
        check_no_xla()
        factor = self.gradient_predivide_factor
        collective = Collective(Kind.ALLREDUCE, None, self.process_set, self.op, 1.0 / factor, factor, grouped=True)
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        buckets = _buckets([tensor for tensor, _ in pairs])
        flat = len(buckets) == 1 and _fit_side_by_side(buckets[0], self.op)
        shapes = [tuple(tensor.shape.as_list()) for tensor in buckets[0]] if flat else []
        with tf.control_dependencies([_begin(first, shapes, self.process_set)]):
            outputs = _side_by_side(collective, buckets[0]) if flat else []
            for bucket in [] if flat else buckets:
                outputs += _reduced(collective, bucket)
        results = [self.compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
        return results, lambda *upstream: self._grouped_allreduce(upstream)


def _begin(first: First | None, shapes: Sequence[tuple[int, ...]], process_set: ProcessSet) -> Any:
    """Add an operation that precedes a reduction: what is due `first`, and once a comparison of shapes, if given."""

    def work(name: str) -> Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]:
        meter.step_done()
        answer = [torch.zeros((), dtype=torch.int32, device="cpu")]
        compared = _compared.setdefault(engine.current_runtime(), set())
        due, key = None if first is None else first(), (name, tuple(shapes))
        if due is None and (not shapes or key in compared):
            return answer

        def wait() -> Sequence[torch.Tensor]:
            if due is not None:
                due()
            if shapes and key not in compared:
                _compare(shapes, name, process_set)
                compared.add(key)
            return answer

        return wait

    return call(work, [], [tf.int32], [[]], name="HorovodStep")[0]


def _compare(shapes: Sequence[tuple[int, ...]], name: str, process_set: ProcessSet) -> None:
    """HorovodInternalError if the gradients of a member have other shapes."""
    found = hvd.allgather_object(list(shapes), name=name, process_set=process_set)
    for rank, theirs in zip(process_set.ranks or (), found, strict=True):
        if theirs != found[0]:
            raise HorovodInternalError(
                f"the gradients on rank {rank} have the shapes {theirs}, but on rank {(process_set.ranks or [0])[0]} "
                f"{found[0]}; build the same model on all ranks"
            )


def _reduced(collective: Collective, tensors: Sequence[Any]) -> list[Any]:
    """Return the reduced tensors of a graph; they travel together."""
    name = re.sub("[^a-zA-Z0-9_/.]", "_", f"HorovodAllreduce_{tensors[0].name}")
    dtypes, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    return carry_out(collective._replace(name=name), tensors, dtypes, shapes)


def _side_by_side(collective: Collective, tensors: Sequence[Any]) -> list[Any]:
    """Return the reduced tensors of a graph. They travel in one, which costs a fraction of handing over each of them.

    Their number is the same on all ranks, and so are their shapes: `_begin` compares them.
    """
    together = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    (output,) = _reduced(collective._replace(grouped=False), [together])
    parts = tf.split(output, [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _fit_side_by_side(tensors: Sequence[Any], op: int) -> bool:
    """Return whether tensors may be reduced as one: Adasum looks at each by itself."""
    if len(tensors) == 1 or op == Adasum or len({tensor.dtype for tensor in tensors}) > 1:
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors) <= _FLAT_BYTES


def _check_finite(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """FloatingPointError if a gradient is not finite here, before any is reduced; in a graph when the result runs."""
    known = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    names = [str(getattr(variable, "path", getattr(variable, "name", "?"))) for _, variable in known]
    tensors = [g.values if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g, _ in known]

    def work(_: str, *arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        check_finite(zip(names, arrays, strict=True), hvd.rank())
        return [torch.zeros((), dtype=torch.int32, device="cpu")]

    return call(work, tensors, [tf.int32], [[]], name="HorovodCheckFinite")[0]


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
