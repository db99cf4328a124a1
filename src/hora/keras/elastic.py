"""Elastic training with Keras and TensorFlow: states of variables, callbacks that update them, and the loop."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hora.errors import HorovodInternalError
from hora.keras.hyperparameters import plain_numbers, remembered_variables, set_number
from hora.keras.values import (
    assign_values,
    broadcast_variables,
    keras_version,
    optimizer_variables,
    read_values,
    runs_in_session,
)
from hora.torch.basics import rank
from hora.torch.elastic.loop import reset, run_fn
from hora.torch.elastic.passes import BegunStep, begun_steps_of
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import broadcast_object

_OF_A_COLLECTIVE = re.compile("Horovod(InternalError|Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, ...)` elastic: it is called again in the new world whenever the world changes."""

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> Any:
        # Only a call, like the loop's own wrapper: it is pickled together with a notebook's function.
        return _with_own_errors(func, args, kwargs)

    return run_fn(translated, reset)


def _with_own_errors(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; a TensorFlow error that names a collective is raised as a HorovodInternalError."""
    try:
        return func(*args, **kwargs)
    except HorovodInternalError:
        raise
    except Exception as error:
        if not (type(error).__module__.startswith("tensorflow.") and _OF_A_COLLECTIVE.search(str(error))):
            raise
        raise HorovodInternalError(str(error)) from error


class TensorFlowState(ObjectState):
    """Variables and plain values: `TensorFlowState(variables=model.variables, epoch=0)`.

    `session`: holds the values of a graph's variables; all global variables by default.

    Args:
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None and variables is None:
            import tensorflow

            variables = tensorflow.compat.v1.global_variables()
        self._session = session
        self._of = list(variables or [])
        self._saved_values: list[tuple[Any, Any]] = []
        self._saved_steps: list[tuple[BegunStep, tuple[int, Mapping[int, Any]]]] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def _variables(self) -> list[Any]:
        return self._of

    def _begun_steps(self) -> list[BegunStep]:
        return begun_steps_of(self._variables(), optimizer_variables)

    def _read(self, variables: list[Any]) -> list[Any]:
        return read_values(variables, self._session)

    def _assign(self, variables: list[Any], values: list[Any]) -> None:
        assign_values(variables, values, self._session)

    def save(self) -> None:
        variables = self._variables()
        self._saved_values = list(zip(variables, self._read(variables), strict=True))
        self._saved_steps = [(step, step.begun(self._read)) for step in self._begun_steps()]
        super().save()

    def restore(self) -> None:
        self._assign([variable for variable, _ in self._saved_values], [value for _, value in self._saved_values])
        known = {id(step): saved for step, saved in self._saved_steps}
        for step in self._begun_steps():
            step.resume(*known.get(id(step), (0, {})), self._assign)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._variables(), 0, self._session)
        self._sync_begun_steps()
        super().sync()
        self.save()

    def _sync_begun_steps(self) -> None:
        """Let all ranks complete their steps in the same call; a rank keeps its own sums of gradients."""
        steps = self._begun_steps()
        mine = [step.begun(self._read)[0] for step in steps]
        for step, here, at_root in zip(steps, mine, broadcast_object(mine, 0), strict=False):
            if here != at_root:
                step.resume(at_root, {}, self._assign)


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer and plain values: `TensorFlowKerasState(model, optimizer, epoch=0, batch=0)`.

    Args:
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("a state needs a built model: give its first layer an input shape, or call it once")
        versions = keras_version(model), keras_version(optimizer)
        if None not in versions and versions[0] != versions[1]:
            raise ValueError(
                f"rank {rank()}: the model is of Keras {versions[0]} and the optimizer of Keras {versions[1]}; use "
                "the same Keras for both"
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._saved_numbers: dict[str, float] = {}
        _build(self.optimizer, model)
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *remembered_variables(self.optimizer)]

    def save(self) -> None:
        self._saved_numbers = plain_numbers(self.optimizer)
        super().save()

    def restore(self) -> None:
        self._set_numbers(self._saved_numbers)
        super().restore()

    def sync(self) -> None:
        self._set_numbers(broadcast_object(plain_numbers(self.optimizer), 0))
        super().sync()

    def _set_numbers(self, numbers: Mapping[str, float]) -> None:
        mine = plain_numbers(self.optimizer)
        for name, number in numbers.items():
            if name in mine and mine[name] != number:
                set_number(self.optimizer, name, number)


def _build(optimizer: Any, model: Any) -> None:
    """Create the optimizer's variables: a rank that joins gets values for all of them."""
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)
    elif hasattr(optimizer, "_create_all_weights") and not runs_in_session():  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer and plain values, for `import keras`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback:
    """Commits the state every few batches and at the end of each epoch."""

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches_left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches_left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches_left -= 1
        if self._batches_left == 0:
            self._batches_left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback:
    """Counts `state.batch`; the first epoch after a reset ends once its remaining batches are done."""

    params: Any

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._done_before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._done_before and steps and self.state.batch >= steps:
            raise StopIteration  # Keras ends the epoch, as when its data is exhausted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before = 0


class UpdateEpochStateCallback:
    """Counts `state.epoch` across resets."""

    _begin: int | None

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first, self._begin = 0, None

    def on_train_begin(self, logs: Any = None) -> None:
        self._first, self._begin = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._begin is None:  # 0, or fit's initial_epoch
            self._begin = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._first + epoch - (self._begin or 0) + 1
