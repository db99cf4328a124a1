"""`DistributedOptimizer` for Keras: Keras 3 on TensorFlow or torch, and Keras 2 (`tf_keras`).

The result's class derives from the given optimizer's class and has its name, attributes and state. So it is saved, and
loaded again with or without Horovod, like the original.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

import hora.torch as hvd
from hora.keras.values import keras_version, runs_in_session
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average, Min


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model with the given Keras and wrap its optimizer.

    Args:
        keras: The package: Keras 3, or `tf_keras`.
        filepath: Of the saved model.
        custom_optimizers: Optimizers of the user that the model may have.
        custom_objects: Other objects of the user that the model needs, by name.
        compression: How gradients travel; by default uncompressed.
        legacy_opts: Whether to use Keras 2's legacy optimizers.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        _restore_from_hdf5(model, str(filepath))
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _restore_from_hdf5(model: Any, filepath: str) -> None:
    """Restore the optimizer's state from an HDF5 file: Keras 3 itself builds it without the layers' variables."""
    optimizer = model.optimizer
    if not filepath.endswith((".h5", ".hdf5")) or not hasattr(optimizer, "apply"):
        return
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    with h5py.File(filepath, "r") as file:
        saved = load_optimizer_weights_from_hdf5_group(file) if "optimizer_weights" in file else []
        values = [np.array(value) for value in saved]
    if len(values) > len(optimizer.variables):
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value)


class _Distributed:
    """Methods of every distributed optimizer."""

    _aggregation: ClassVar[Callable[[], Any]]

    @property
    def _hora(self) -> Any:
        """Takes the gradients of calls, and calls a function with the reduced ones when a step is complete.

        Every object that the class creates has its own aggregation, as with `from_config`.
        """
        found = self.__dict__.get("_hora_aggregation")
        if found is None:
            # Bypasses the optimizer's own __setattr__, which would track it as part of the model.
            found = self.__dict__["_hora_aggregation"] = type(self)._aggregation()
            found.belong_to(self)
        return found

    def register_local_var(self, variable: Any) -> None:
        """Exclude the gradient of this variable from the reduction."""
        self._hora.local[id(variable)] = variable


class _Keras3(_Distributed):
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over the ranks, then apply them."""
        known = trainable_variables
        if known is None:
            known = self._trainable_variables  # type: ignore[attr-defined]
        self._hora(self, list(grads), list(known), super().apply)  # type: ignore[misc]


class _Keras2(_Distributed):
    """Reduces gradients when they are applied, unless it did so when computing them."""

    def __repr__(self) -> str:
        """Name the module that Horovod's optimizers of Keras have: TensorFlow Recommenders Addons looks for it."""
        return f"<horovod._keras.{type(self).__name__} object at {id(self):#x}>"

    @property
    def _agg_helper(self) -> Any:
        """The sums of several backward passes; None if each pass is a step."""
        return self._hora.helper

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Return the gradients of the loss, reduced over the ranks, with their variables."""
        parent: Any = super()
        if hasattr(parent, "_compute_gradients"):
            return self._computed(parent._compute_gradients(loss, var_list, grad_loss, tape=tape))
        return self._computed(parent.compute_gradients(loss, var_list, tape=tape))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Return the gradients of the loss, reduced over the ranks, with their variables."""
        return self._compute_gradients(loss, var_list, None, tape)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the gradients of the loss in a graph, reduced over the ranks."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [gradient for gradient, _ in self._computed(zip(gradients, params, strict=True))]

    def _computed(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = self._hora.compute_gradients([gradient for gradient, _ in pairs], variables)
        # Not after a failure: the next step may not be of this kind.
        self.__dict__["_hora_computed"] = "eagerly" if _is_eager() else "in a function"
        return list(zip(reduced, variables, strict=True))

    def _pop_computed(self) -> bool:
        """Return whether the gradients were reduced when they were computed.

        A function that only applies gradients is traced for all calls, and perhaps twice.
        """
        how = self.__dict__.pop("_hora_computed", None)
        if how == "eagerly" and not _is_eager():
            self.__dict__["_hora_computed"] = how
        return how is not None

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Reduce the gradients over the ranks, so that a LossScaleOptimizer around this one decides alike on all."""
        pairs = list(grads_and_vars)
        self._hora.check_one_pass()
        if self._pop_computed():
            return pairs
        variables = [variable for _, variable in pairs]
        return list(zip(self._hora.reduced([gradient for gradient, _ in pairs], variables), variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # its name in tf_keras.optimizers.legacy

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients over the ranks unless they were aggregated before, then apply them."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        for variable in variables:
            if hasattr(variable, "path"):
                raise ValueError(
                    f"rank {hvd.rank()}: an optimizer of Keras 2 (tf_keras) got a variable of Keras 3, "
                    f"{variable.name}; use the same Keras for the model and the optimizer"
                )
        parent: Any = super()
        done_before = kwargs.get("skip_gradients_aggregation") or not kwargs.get(
            "experimental_aggregate_gradients", True
        )
        computed = self._pop_computed() or done_before
        if not done_before:
            kwargs["experimental_aggregate_gradients"] = False

        def update(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
            return parent.apply_gradients(zip(gradients, variables, strict=True), *args, **kwargs)

        gradients = [gradient for gradient, _ in pairs]
        if not computed:
            return self._hora(self, gradients, variables, update)
        return self._hora.update(self, gradients, variables, lambda: update(gradients, variables))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    on_drift: str = "warn",
) -> Any:
    """Return the same optimizer (hyperparameters and state kept) that reduces gradients over the ranks.

    The ranks compare hyperparameters and variables now and then; `on_drift`: "warn" on rank 0, "error" on all ranks,
    or "ignore".

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        device_sparse: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        sparse_as_dense: Turn sparse gradients into dense ones before they are reduced.
        gradient_predivide_factor: Divide gradients by this before the sum and by size / factor after it. Only with
            `op=hvd.Average`.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
        average_aggregated_gradients: With `backward_passes_per_step` above 1: divide the accumulated gradients by that
            number.
        num_groups: Deprecated, as in Horovod: use `groups`.
        groups: An int: that many groups of parameters; or a list of lists: these parameters travel together.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        scale_local_gradients: Divide gradients that are not reduced by the number of ranks, so that all have one scale.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            f"rank {hvd.rank()}: {type(optimizer).__name__} is a DistributedOptimizer already; wrap the plain "
            "optimizer once"
        )
    mixin, backend = _kind(optimizer)
    if mixin is _Keras2 and runs_in_session():
        _check_for_session(optimizer)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups instead", DeprecationWarning, stacklevel=2)
    groups = groups if groups is not None else (num_groups or None)
    options: dict[str, Any] = {
        "op": op,
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "process_set": process_set,
    }
    if compression is not None:
        options["compression"] = compression
    how = (backward_passes_per_step, average_aggregated_gradients, scale_local_gradients, on_drift)
    if backend == "torch":
        from hora.keras.torch_backend import TorchAggregation

        aggregation: Callable[[], Any] = functools.partial(TorchAggregation, options, *how)
    else:
        from hora.keras.tensorflow_backend import TensorFlowAggregation

        aggregation = functools.partial(TensorFlowAggregation, options, *how)
    if mixin is _Keras3:
        let_keras_know()
    result = _of_class(optimizer, mixin, aggregation)
    assert result._hora is not None  # created now: it validates the options
    if name is not None:
        result.__dict__["name" if "name" in result.__dict__ else "_name"] = name
    return result


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """Return a DistributedOptimizer that does not reduce the gradients of the variables of `local_layers`.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """
    result = DistributedOptimizer(optimizer, *args, **kwargs)
    register_local_layers(result, local_layers)
    return result


def register_local_layers(optimizer: Any, layers: Any) -> None:
    """Exclude the gradients of the variables of a layer, of several, or of none from the reduction."""
    for layer in layers if isinstance(layers, (list, tuple, set)) else [layers]:
        for variable in [] if layer is None else layer.trainable_weights:
            optimizer.register_local_var(variable)


def keras_backend() -> str:
    """Return the backend of Keras 3 in this process. Raises ValueError for an unsupported one."""
    import keras

    backend = str(keras.backend.backend())
    if backend not in ("tensorflow", "torch"):
        raise ValueError(
            f"horovod.keras works with the backends tensorflow and torch of Keras, but KERAS_BACKEND is {backend}: set "
            "KERAS_BACKEND=torch or KERAS_BACKEND=tensorflow before Keras is imported"
        )
    return backend


def _kind(optimizer: Any) -> tuple[type[_Distributed], str]:
    """Return the mixin for the optimizer's class, and the backend of its tensors."""
    version = keras_version(optimizer)
    if version == 2:
        return _Keras2, "tensorflow"
    if version == 3 and callable(getattr(optimizer, "apply", None)):
        return _Keras3, keras_backend()
    if type(optimizer).__module__.startswith("tensorflow."):
        raise ValueError(
            f"this DistributedOptimizer wraps optimizers of Keras, but it got {type(optimizer).__qualname__} of "
            "tf.compat.v1; pass it to the one of horovod.tensorflow, or use an optimizer of tf.keras.optimizers"
        )
    raise ValueError(
        f"DistributedOptimizer wraps optimizers of Keras, but it got {type(optimizer).__qualname__}; an optimizer of "
        "torch goes to horovod.torch"
    )


def _is_eager() -> bool:
    import tensorflow

    return bool(tensorflow.executing_eagerly())


def _check_for_session(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that Keras 2 would replace with an unwrapped one in a graph."""
    import tf_keras

    if isinstance(optimizer, tf_keras.optimizers.Optimizer):
        raise ValueError(
            f"rank {hvd.rank()}: Keras 2 does not train a graph of tf.compat.v1 with {type(optimizer).__name__} of "
            f"tf.keras.optimizers; pass tf.keras.optimizers.legacy.{type(optimizer).__name__}(…)"
        )


def _of_class(optimizer: Any, mixin: type[_Distributed], aggregation: Callable[[], Any]) -> Any:
    """Return an object of a new class with the attributes of `optimizer`, independent of its constructor."""
    base = type(optimizer)
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_aggregation": staticmethod(aggregation),
    }
    wanted = type(base.__name__, (mixin, base), names)
    if mixin is _Keras3:  # Keras saves objects of the new class as those of the given one
        from keras.src import api_export
        from keras.src.saving import object_registration

        for registry in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
            if base in registry:
                registry[wanted] = registry[base]
    result: Any = object.__new__(wanted)
    result.__dict__.update(optimizer.__dict__)
    return result


@functools.cache
def let_keras_know() -> None:
    """Patch Keras 3 in the two places where it must know about distributed optimizers."""
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.trainers.trainer import Trainer

    finite_here, compiles = LossScaleOptimizer.check_finite, Trainer._resolve_auto_jit_compile

    def check_finite(self: Any, grads: Any) -> Any:
        """Return whether the gradients are finite on all ranks: either all make the step or none does."""
        finite = finite_here(self, grads)
        if not isinstance(self.inner_optimizer, _Distributed):
            return finite
        from keras import ops

        members = self.inner_optimizer._hora.process_set
        if keras_backend() == "torch":
            return hvd.allreduce(finite.to(torch.int32), op=Min, process_set=members) > 0
        import hora.tensorflow.ops

        return hora.tensorflow.ops.allreduce(ops.cast(finite, "int32"), op=Min, process_set=members) > 0

    def resolve_auto_jit_compile(self: Any) -> bool:
        """Return False for a model whose gradients are reduced: XLA cannot compile that operation."""
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return False if isinstance(inner, _Distributed) else bool(compiles(self))

    LossScaleOptimizer.check_finite = check_finite
    Trainer._resolve_auto_jit_compile = resolve_auto_jit_compile
