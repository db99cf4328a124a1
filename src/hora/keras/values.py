"""Values of Keras variables of any backend, and of numpy: read, assign, and pass through the collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import hora.torch as hvd
from hora.torch.functions import broadcast_tensors
from hora.torch.reduce_op import Average, Sum


def as_torch(array: Any) -> torch.Tensor:
    """Return a tensor that shares the array's memory; copies read-only arrays and layouts unknown to torch.

    numpy has no bfloat16 of its own: such arrays have the dtype of `ml_dtypes`, and are converted through their bits.
    """
    array = np.asarray(array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(tensor: torch.Tensor) -> Any:
    """Return an array that shares the memory of a CPU tensor."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_numpy(value: Any) -> Any:
    """Return a tensor, a variable or a number as a numpy array."""
    if isinstance(value, torch.Tensor):
        return as_numpy(value.detach().cpu())
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def runs_in_session() -> bool:
    """Return whether a session holds the values of variables: Keras 2 with a graph of `tf.compat.v1`."""
    tensorflow: Any = sys.modules.get("tensorflow")
    return tensorflow is not None and not tensorflow.compat.v1.executing_eagerly_outside_functions()


def read_values(variables: Sequence[Any], session: Any = None) -> list[Any]:
    """Return copies of the variables' values as numpy arrays; of a graph's in this session, else in Keras's."""
    if session is not None:
        return [np.array(value) for value in session.run(list(variables))]
    if runs_in_session():
        from tf_keras.src import backend

        return [np.array(value) for value in backend.batch_get_value(list(variables))]
    return [np.array(to_numpy(variable)) for variable in variables]


def assign_values(variables: Sequence[Any], values: Sequence[Any], session: Any = None) -> None:
    """Assign a value to each variable."""
    if session is None and runs_in_session():
        from tf_keras.src import backend

        backend.batch_set_value(list(zip(variables, values, strict=True)))
        return
    for variable, value in zip(variables, values, strict=True):
        if session is None:
            variable.assign(value)
        else:
            variable.load(value, session)


def keras_version(thing: object) -> int | None:
    """Return 2 or 3, the Keras version of an object; None for neither."""
    packages = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    return 2 if "tf_keras" in packages else 3 if "keras" in packages else None


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of any Keras; none without an optimizer."""
    variables = getattr(optimizer, "variables", [])
    return list(variables() if callable(variables) else variables)


def broadcast_variables(variables: Sequence[Any], root_rank: int, session: Any = None) -> None:
    """Assign the root's values to variables of any backend. Raises ValueError if ranks' variables differ.

    Args:
        variables: The variables to be overwritten with the root's values.
        root_rank: The rank whose value everyone gets.
        session: Accepted for Horovod's sake: a session of TensorFlow 1.
    """
    mine = [as_torch(value) for value in read_values(variables, session)]
    values = broadcast_tensors(mine, root_rank, "keras.variables")
    assign_values(variables, [as_numpy(value) for value in values], session)


def broadcast_global_variables(root_rank: int) -> None:
    """Assign the root's values to all variables of Keras's session. Raises RuntimeError without a session.

    Args:
        root_rank: The rank whose value everyone gets.
    """
    if not runs_in_session():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs of tf.compat.v1; call hvd.broadcast_variables(variables, "
            f"root_rank={root_rank}), or add hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) to fit"
        )
    from tf_keras.src import backend

    from hora.tensorflow.functions import broadcast_global_variables as in_graph

    backend.get_session().run(in_graph(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
) -> Any:
    """Reduce a value over the ranks; tensors yield tensors, everything else numpy arrays.

    Args:
        value: The tensor, array or number.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
    """
    op = op if op is not None else (Average if average else Sum)
    options: dict[str, Any] = {"op": op, "name": name}
    options |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if compression is not None:
        options["compression"] = compression
    return _through("allreduce", value, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along dimension 0.

    Args:
        value: The tensor, array or number.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    return _through("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value.

    Args:
        value: The tensor, array or number.
        root_rank: The rank whose value everyone gets.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    return _through("broadcast", value, root_rank=root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce a value over the ranks and keep this rank's share of its rows.

    Args:
        value: The tensor, array or number.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
    """
    return _through("reducescatter", value, name=name, op=op)


def _through(collective: str, value: Any, **options: Any) -> Any:
    torch_one: Callable[..., Any] = getattr(hvd, collective)
    if isinstance(value, torch.Tensor):
        return torch_one(value, **options)
    if type(value).__module__.startswith("tensorflow."):
        import hora.tensorflow.ops

        return getattr(hora.tensorflow.ops, collective)(value, **options)
    array = to_numpy(value)
    result = as_numpy(torch_one(as_torch(array.copy()), **options))
    return result if result.ndim or isinstance(value, np.ndarray) else result[()]
