"""Reduction of gradients over the ranks, shared by the tape and the optimizers.

In eager mode all dense gradients form one grouped operation. In a graph they are divided into buckets, last layers
first. Each bucket's operation submits it as soon as its gradients are computed, so the engine reduces while backward
continues.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
import torch

import hora.torch as hvd
from hora import engine
from hora.engine.request import ReduceOp
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter
from hora.tensorflow.bridge import call
from hora.tensorflow.compression import Compression, Compressor
from hora.tensorflow.drift import Comparisons, compared, due_for_tape, plain_numbers, settings_for
from hora.tensorflow.ops import allreduce, grouped_allreduce, size_op
from hora.torch.basics import rank
from hora.torch.elastic.passes import BegunStep
from hora.torch.norms import check_finite
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import Adasum, Average

_V1Optimizer: Any = tf.compat.v1.train.Optimizer
_BUCKET_BYTES = 4 * 2**20
_FLAT_BYTES = 2**20

# Called before each reduction of all gradients, with the name of the operation of a graph, or "". Returns what must be
# done first and waits for other ranks. That gets a name, too: two optimizers of a graph may do it at the same time.
First = Callable[[str], Callable[..., None] | None]

# The same, given the variables that all ranks train.
Before = Callable[[Sequence[Any], str], Callable[..., None] | None]

# Names and shapes of gradients that all ranks of a runtime have compared and found equal.
_compared: weakref.WeakKeyDictionary[engine.Runtime, set[Any]] = weakref.WeakKeyDictionary()


class GraphOptimizer(_V1Optimizer):
    """Reduces gradients over the ranks when it computes them, and delegates the rest to the given optimizer."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: GradientReduction,
        passes: int,
        average: bool,
        on_drift: str,
    ) -> None:
        if isinstance(optimizer, GraphOptimizer):
            raise ValueError(
                f"rank {rank()}: {optimizer.get_name()} is a DistributedOptimizer already; wrap the plain optimizer, "
                "once"
            )
        if passes > 1 and tf.executing_eagerly():
            raise ValueError(
                f"backward_passes_per_step={passes} with an optimizer of tf.compat.v1 needs a graph; use one of "
                "tf.keras.optimizers in eager mode"
            )
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self.get_slot, self.get_slot_names = optimizer.get_slot, optimizer.get_slot_names
        self.variables = optimizer.variables
        comparisons = Comparisons(
            settings_for(on_drift), reduction.process_set, functools.partial(plain_numbers, optimizer)
        )
        self._aggregation = Aggregation(reduction, passes, average, comparisons.due)
        self._agg_helper = self._aggregation.helper

    def __repr__(self) -> str:
        """Name Horovod's module: TensorFlow Recommenders Addons looks for it."""
        return f"<horovod.tensorflow.{type(self).__name__} object at {id(self):#x}>"

    def register_local_var(self, variable: Any) -> None:
        """Exclude the gradient of this variable from the reduction."""
        self._aggregation.local[id(variable)] = variable

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the given optimizer's gradients, reduced over the ranks, with their variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        with tf.name_scope(f"{self.get_name()}_Allreduce"):
            return list(zip(self._aggregation.compute_gradients(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply gradients of `compute_gradients` if they complete a step, otherwise only count the call."""
        pairs, helper = list(grads_and_vars), self._agg_helper
        if helper is None:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        if helper.counter is None:
            raise ValueError(
                f"rank {rank()}: with backward_passes_per_step={helper.backward_passes_per_step} gradients come from "
                f"compute_gradients() of {self.get_name()}; call it, or minimize(), before apply_gradients()"
            )
        done = helper.apply_gradients(
            [gradient for gradient, _ in pairs],
            lambda: self._optimizer.apply_gradients(pairs, global_step=global_step),
            lambda: None if global_step is None else global_step.assign_add(1),
        )
        return tf.group(done, name=name)


class Aggregation(BegunStep):
    """Accumulates gradients over `passes` calls; the last call reduces and applies the sums. `local`: not reduced.

    In the graph of a session the sums and the counter are local variables: they are neither saved nor broadcast, and
    `tf.compat.v1.local_variables_initializer` sets them to zero.
    """

    def __init__(self, reduction: GradientReduction, passes: int, average: bool, before: Before) -> None:
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, but it is {passes}")
        super().__init__()
        self.backward_passes_per_step, self.average_aggregated_gradients = passes, average
        self.counter: Any = None
        self.reduction = reduction
        self._before = before
        self.local: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}
        self._graph: Any = None  # owner of these variables; None outside of sessions
        self._num_begun = 0  # passes of the current step before these variables existed: those of other ranks
        if passes > 1:
            self.remember()

    @property
    def helper(self) -> Aggregation | None:
        """Horovod's name for the sums of several passes; None if each pass is a step."""
        return None if self.backward_passes_per_step == 1 else self

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of one step, reduced; the ranks compare these variables now and then."""
        first = None
        if tf.compat.v1.executing_eagerly_outside_functions():  # variables have values outside the session
            shared = compared(variables, self.local)
            first = functools.partial(self._before, shared) if shared else None
        return self.reduction(gradients, variables, self.local, first)

    def compute_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Accumulate gradients; returns the reduced sums in every `passes`-th call, otherwise the sums."""
        if self.helper is None:
            return self.reduced(gradients, variables)
        pairs = enumerate(zip(gradients, variables, strict=True))
        # Also without a gradient: an earlier pass may have added one.
        known = [i for i, (gradient, variable) in pairs if gradient is not None or id(variable) in self._sums]
        with tf.init_scope():
            self._make([variables[i] for i in known])
        sums = [self._sums[id(variables[i])] for i in known]
        new = {i: tf.convert_to_tensor(gradients[i]) for i in known if gradients[i] is not None}
        with tf.control_dependencies(list(new.values())):
            added = [self._sums[id(variables[i])].assign_add(gradient) for i, gradient in new.items()]
            count = tf.identity(self.counter.assign_add(1))
        is_last = tf.equal(count, self.backward_passes_per_step)
        scale = 1.0 / self.backward_passes_per_step if self.average_aggregated_gradients else 1.0

        def reduce() -> list[Any]:
            scaled = [total.read_value() * tf.cast(scale, total.dtype) for total in sums]
            return self.reduced(scaled, [variables[i] for i in known])

        with tf.control_dependencies(added):
            results = tf.cond(is_last, reduce, lambda: [total.read_value() for total in sums])
        with tf.control_dependencies(results):
            renewed = tf.cond(is_last, lambda: self._renew(sums), lambda: tf.constant(False))
        with tf.control_dependencies([renewed]):
            outputs = dict(zip(known, [tf.identity(result) for result in results], strict=True))
        return [outputs.get(i) for i in range(len(gradients))]

    def apply_gradients(self, gradients: Sequence[Any], apply: Callable[[], Any], count: Callable[[], Any]) -> Any:
        """Call `apply` if the latest gradients, from which these come, complete a step, otherwise `count`."""

        def chosen(update: Callable[[], Any], answer: bool) -> Any:
            done = update()
            with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
                return tf.constant(answer)

        with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
            # The counter says it also in a function that was traced in another pass than this one.
            is_complete = tf.constant(True) if self.counter is None else tf.equal(self.counter.read_value(), 0)
            return tf.cond(is_complete, lambda: chosen(apply, True), lambda: chosen(count, False))

    def begun(self, read: Callable[[list[Any]], list[Any]]) -> tuple[int, dict[int, Any]]:
        if self.counter is None:
            return self._num_begun, {}
        count, *sums = read([self.counter, *self._sums.values()])
        return int(count), dict(zip(self._sums, sums, strict=True))

    def resume(self, num_begun: int, sums: Mapping[int, Any], assign: Callable[[list[Any], list[Any]], None]) -> None:
        self._num_begun = num_begun
        if self.counter is None:
            return
        zeros = ((key, total.shape, total.dtype.as_numpy_dtype) for key, total in self._sums.items())
        values = [sums[key] if key in sums else np.zeros(shape, dtype) for key, shape, dtype in zeros]
        assign([self.counter, *self._sums.values()], [num_begun, *values])

    def summed(self) -> Collection[int]:
        return self._sums.keys()

    def _renew(self, sums: Sequence[Any]) -> Any:
        zeroed = [variable.assign(tf.zeros_like(variable)) for variable in [self.counter, *sums]]
        with tf.control_dependencies(zeroed):
            return tf.constant(True)

    def _make(self, variables: Sequence[Any]) -> None:
        """Create the missing counter and sums, outside of any function."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self.counter is None or graph is not self._graph:
            self._graph, self._sums = graph, {}
            self.counter = _local_variable(tf.constant(self._num_begun, tf.int32), "hvd_counter")
        for variable in variables:
            if id(variable) not in self._sums:
                self._sums[id(variable)] = _zeros(variable.shape, variable.dtype, "hvd_sum")


def _zeros(shape: Any, dtype: Any, name: str) -> Any:
    return _local_variable(tf.zeros(shape, tf.as_dtype(dtype).base_dtype), name)


def _local_variable(value: Any, name: str) -> Any:
    v1 = tf.compat.v1
    if tf.executing_eagerly():
        return tf.Variable(value, trainable=False, name=name)
    collections = [v1.GraphKeys.LOCAL_VARIABLES]
    return v1.Variable(value, trainable=False, use_resource=True, collections=collections, name=name)


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """Settings of a gradient reduction; call it with gradients and their variables."""

    op: int = Average
    compression: type[Compressor] | Compressor = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError(
                f"gradient_predivide_factor ({self.gradient_predivide_factor}) is not supported with op "
                f"{ReduceOp(self.op).name}, only with Average"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GradientReduction:
        """Return the settings among the arguments of a function."""
        settings = {field.name: given[field.name] for field in fields(cls)}
        return cls(**settings | {"groups": given["num_groups"] if given["groups"] is None else given["groups"]})

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        local: Collection[int] = (),
        first: First | None = None,
    ) -> list[Any]:
        """Return the reduced gradients; None stays None. `local`: ids of variables whose gradients are not reduced.

        Ranks outside the process set keep their gradients.
        """
        results, world = list(gradients), engine.current_runtime().world
        alone = world.size == 1 and not world.elastic  # now and later
        if alone or (registered_id(self.process_set) and not self.process_set.included()):
            return results
        if engine.current_runtime().config.nan_check:
            with tf.control_dependencies([_check_finite(gradients, variables)]):
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
        for i, gradient in self._reduced(dense, results, variables, first):
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
    ) -> Iterator[tuple[int, Any]]:
        """Yield positions of dense gradients and their reduced values."""
        if not dense:
            return
        if self.groups or tf.executing_eagerly():
            due = first("") if first is not None and tf.executing_eagerly() else None
            if due is not None:
                due()
            if tf.executing_eagerly() and len(dense) < len(gradients):
                self._check_present(dense, variables)
            for members in self._grouped(dense, variables):
                yield from zip(members, self._by(grouped_allreduce, [gradients[i] for i in members]), strict=True)
            return
        present, dense = dense, dense[::-1]  # backward computes the gradients of the last layers first
        yield from zip(dense, self._overlapped([gradients[i] for i in dense], first, present, variables), strict=True)

    def _by(self, collective: Callable[..., Any], given: Any) -> Any:
        factor = self.gradient_predivide_factor
        return collective(
            given,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )

    def _grouped(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return the positions in `dense` by group; without groups there is one."""
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

    def _check_present(self, present: list[int], variables: Sequence[Any]) -> None:
        """HorovodInternalError if other ranks have gradients for other variables: theirs would be added to these.

        A rank that has all gradients has more of them, or another shape here, which the engine tells.
        """
        flags = tf.scatter_nd([[number] for number in present], tf.ones(len(present)), [len(variables)])
        shape = [len(variables), *[1] * 7]  # of no gradient
        (means,) = self._by(grouped_allreduce, [tf.reshape(flags, shape)])
        means = means.numpy().reshape(-1) / (self.process_set.size() if self.op == hvd.Sum else 1)
        odd = [number for number, mean in enumerate(means.tolist()) if 0.001 < mean < 0.999]
        if odd:
            raise HorovodInternalError(_missing_text(odd, present, variables))

    def _overlapped(
        self, gradients: Sequence[Any], first: First | None, present: list[int], variables: Sequence[Any]
    ) -> list[Any]:
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        buckets = _buckets([tensor for tensor, _ in pairs])
        flat = len(buckets) == 1 and _fit_side_by_side(buckets[0], self.op)
        shapes = [tuple(tensor.shape.as_list()) for tensor in buckets[0]] if flat else []
        compressed = replace(self, compression=Compression.none)
        with tf.control_dependencies([self._begin(first, shapes, present, variables)]):
            outputs = compressed._side_by_side(buckets[0]) if flat else []
            for bucket in [] if flat else buckets:
                outputs += compressed._by(grouped_allreduce, bucket)
        return [self.compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]

    def _side_by_side(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the reduced tensors of a graph, concatenated into one, which costs a fraction of separate ones.

        Their number and shapes are the same on all ranks: `_begin` compares them.
        """
        together = self._by(allreduce, tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0))
        parts = tf.split(together, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _begin(
        self, first: First | None, shapes: Sequence[tuple[int, ...]], present: Sequence[int], variables: Sequence[Any]
    ) -> Any:
        """Add an operation that precedes a reduction: what is due `first`, and once a comparison of gradients."""

        def work(name: str) -> Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]:
            meter.step_done()
            answer = [torch.zeros((), dtype=torch.int32, device="cpu")]
            compared = _compared.setdefault(engine.current_runtime(), set())
            due, key = None if first is None else first(name), (name, tuple(present), tuple(shapes))
            if due is None and key in compared:
                return answer

            def wait() -> Sequence[torch.Tensor]:
                if due is not None:
                    due(f"{name}.first")
                if key not in compared:
                    self._compare(shapes, present, variables, name)
                    compared.add(key)
                return answer

            return wait

        return call(work, [], [tf.int32], [[]], name="HorovodStep")[0]

    def _compare(
        self, shapes: Sequence[tuple[int, ...]], present: Sequence[int], variables: Sequence[Any], name: str
    ) -> None:
        """HorovodInternalError if the gradients of a member have other shapes, or are for other variables."""
        gathered = hvd.allgather_object((list(shapes), list(present)), name=name, process_set=self.process_set)
        found = [theirs for theirs, _ in gathered]
        odd = set().union(*({*theirs} ^ {*present} for _, theirs in gathered))
        if odd and max(odd) < len(variables) and all(len(theirs) == len(found[0]) for theirs in found):
            raise HorovodInternalError(_missing_text(sorted(odd), present, variables))
        ranks = self.process_set.ranks or []
        for member, theirs in zip(ranks, found, strict=True):
            if theirs != found[0]:
                raise HorovodInternalError(
                    f"the gradients on rank {member} have the shapes {theirs}, but on rank {ranks[0]} {found[0]}; "
                    "build the same model on all ranks"
                )


def _missing_text(odd: Collection[int], present: Collection[int], variables: Sequence[Any]) -> str:
    names = {number: str(getattr(variables[number], "path", getattr(variables[number], "name", "?"))) for number in odd}
    lacking = [name for number, name in names.items() if number not in present]
    having = [name for number, name in names.items() if number in present]
    said = [f"rank {hvd.rank()} has no gradient for {', '.join(lacking)}, but others have"] if lacking else []
    said += [f"rank {hvd.rank()} has a gradient for {', '.join(having)}, but others have no gradient"] if having else []
    return "; ".join(said) + ": use the same variables in the same step on all ranks, say by adding 0 times their sum"


def _fit_side_by_side(tensors: Sequence[Any], op: int) -> bool:
    """Return whether tensors may be reduced as one: Adasum treats each separately."""
    if len(tensors) == 1 or op == Adasum or len({tensor.dtype for tensor in tensors}) > 1:
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors) <= _FLAT_BYTES


def _check_finite(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Raise FloatingPointError if a gradient is not finite on this rank, before the reduction."""
    known = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    names = [str(getattr(variable, "path", getattr(variable, "name", "?"))) for _, variable in known]
    tensors = [g.values if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g, _ in known]

    def work(_: str, *arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        check_finite(zip(names, arrays, strict=True), hvd.rank())
        return [torch.zeros((), dtype=torch.int32, device="cpu")]

    return call(work, tensors, [tf.int32], [[]], name="HorovodCheckFinite")[0]


def _buckets(tensors: Sequence[Any]) -> list[list[Any]]:
    """Divide tensors into runs of at least `_BUCKET_BYTES`; a tensor of unknown shape counts as empty."""
    buckets: list[list[Any]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return buckets


class _DistributedTape:
    """Methods of a distributed tape, mixed into the given tape's class; both share their state."""

    _aggregation: Aggregation

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradients of this variable from the reduction."""
        self._aggregation.local[id(source)] = source

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **kwargs: Any
    ) -> Any:
        """Return the tape's own gradients, reduced over the ranks. `use_generic_names` is for old code: ignored."""
        gradients = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        flat = self._aggregation.reduced(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, flat)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of a source and its gradient: those that are not reduced, and those that are."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = self._aggregation.local
        return [pair for pair in pairs if id(pair[0]) in local], [pair for pair in pairs if id(pair[0]) not in local]


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
    on_drift: str = "warn",
) -> Any:
    """Return a tape with the records of `gradtape` whose `gradient` reduces over the ranks.

    The ranks compare the variables now and then; `on_drift`: "warn" on rank 0, "error" on all, "ignore".

    Args:
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        device_sparse: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        sparse_as_dense: Turn sparse gradients into dense ones before they are reduced.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        gradient_predivide_factor: Divide gradients by this before the sum and by size / factor after it. Only with
            `op=hvd.Average`.
        num_groups: Deprecated, as in Horovod: use `groups`.
        groups: An int: that many groups of parameters; or a list of lists: these parameters travel together.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        scale_local_gradients: Divide gradients that are not reduced by the number of ranks, so that all have one scale.
    """
    reduction = GradientReduction.of(locals())
    if isinstance(gradtape, _DistributedTape):
        raise ValueError(f"rank {rank()}: this tape is a DistributedGradientTape already; wrap the plain one once")
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape wraps a tf.GradientTape, but it got {type(gradtape).__name__}")
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups instead", DeprecationWarning, stacklevel=2)
    base = type(gradtape)
    tape: Any = object.__new__(type(base.__name__, (_DistributedTape, base), {}))
    tape.__dict__ = gradtape.__dict__  # shared: both see what either records
    before = functools.partial(due_for_tape, settings_for(on_drift), process_set)
    tape._aggregation = Aggregation(reduction, 1, False, before)
    return tape


def PartialDistributedGradientTape(gradtape: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """Return a DistributedGradientTape that does not reduce the gradients of the variables of `local_layers`.

    Args:
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for layer in local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]:
        for variable in [] if layer is None else layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
