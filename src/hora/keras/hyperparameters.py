"""Hyperparameters of Keras optimizers: read them, and set them so that a compiled training step follows.

TensorFlow functions follow variables, such as the learning rate. Other hyperparameters of Keras 3 and of the optimizers
of Keras 2.11 and later are numbers, which a function keeps as they were when it was traced.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hora.keras.values import assign_values, keras_version, optimizer_variables, read_values, runs_in_session


class FollowedNumber(float):
    """A number that TensorFlow functions read from a variable when they run, not once when they are traced.

    A copy, a pickled one and a saved model have a plain number instead.
    """

    dtype = float  # Keras 3 asks for it, and treats the number as any other
    variable: Any

    def __new__(cls, value: float, variable: Any) -> FollowedNumber:
        number = super().__new__(cls, value)
        number.variable = variable
        return number

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        import tensorflow

        return tensorflow.cast(self.variable, dtype or self.variable.dtype, name=name)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that has the hyperparameters, without the loss scaling around it."""
    return innermost(optimizer.inner_optimizer) if hasattr(optimizer, "inner_optimizer") else optimizer


def learning_rate_variable(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if the rate follows a Keras schedule."""
    optimizer = innermost(optimizer)
    rate = getattr(optimizer, "_learning_rate", None)
    rate = rate if hasattr(rate, "assign") else getattr(optimizer, "learning_rate", None)
    return rate if hasattr(rate, "assign") else None


def read_number(optimizer: Any, name: str) -> float | None:
    """Return a hyperparameter, or None if the optimizer has none of this name that is a number."""
    value: Any = getattr(innermost(optimizer), name, None)
    if hasattr(value, "assign"):
        value = read_values([value])[0]
    is_number = isinstance(value, (int, float, np.number)) or getattr(value, "shape", None) == ()
    return float(value) if is_number and not isinstance(value, bool) else None


def set_number(optimizer: Any, name: str, value: float) -> None:
    """Set a hyperparameter."""
    optimizer = innermost(optimizer)
    known = getattr(optimizer, name)
    if hasattr(known, "assign"):
        assign_values([known], [value])
    elif isinstance(known, FollowedNumber):
        known.variable.assign(value)
        setattr(optimizer, name, FollowedNumber(value, known.variable))
    else:
        setattr(optimizer, name, value)


def follow_number(model: Any, name: str) -> None:
    """Let the model's compiled training step read this hyperparameter whenever it runs."""
    optimizer = innermost(getattr(model, "optimizer", None))
    known: Any = getattr(optimizer, name, None)
    if type(known) not in (int, float) or hasattr(optimizer, "_set_hyper") or not _is_compiled(optimizer):
        return
    import tensorflow

    variable = tensorflow.Variable(float(known), dtype=tensorflow.float32, trainable=False, name=f"hvd_{name}")
    setattr(optimizer, name, FollowedNumber(known, variable))
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)  # an earlier fit may have traced it with the number


def _is_compiled(optimizer: Any) -> bool:
    """Return whether TensorFlow functions may contain the optimizer's step."""
    if runs_in_session():
        return False
    if keras_version(optimizer) == 2:
        return True
    keras = sys.modules.get("keras")
    return keras is not None and keras.backend.backend() == "tensorflow"


def remembered_variables(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer.

    Keras 2 does not list those of its hyperparameters and of its loss scaling.
    """
    listed = optimizer_variables(optimizer)
    if keras_version(optimizer) != 2:
        return listed
    import tensorflow

    known = {id(variable) for variable in listed}
    tracked = tensorflow.train.TrackableView(optimizer).descendants()
    variables = [found for found in tracked if isinstance(found, tensorflow.Variable) and id(found) not in known]
    return listed + sorted(variables, key=lambda variable: str(variable.name))


def plain_numbers(optimizer: Any) -> dict[str, float]:
    """Return the hyperparameters that are plain numbers, by their names."""
    optimizer = innermost(optimizer)
    if not hasattr(optimizer, "get_config"):
        return {}
    names = [name for name, value in optimizer.get_config().items() if type(value) in (int, float, FollowedNumber)]
    found: dict[str, Any] = {name: getattr(optimizer, name, None) for name in names}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float, FollowedNumber)}


def compared_numbers(optimizer: Any) -> dict[str, float]:
    """Return the hyperparameters that all ranks should have alike, the learning rate first."""
    if optimizer is None:
        return {}
    rate = read_number(optimizer, "learning_rate") if learning_rate_variable(optimizer) is not None else None
    return ({} if rate is None else {"learning_rate": rate}) | plain_numbers(optimizer)
