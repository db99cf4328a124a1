"""Bringing all ranks to the same state: variables from a root, objects from a root or from every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import hora.torch as hvd
from hora.tensorflow.ops import broadcast_
from hora.torch.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Assign the root's values to the variables (always in place). ValueError if ranks have different ones."""
    broadcast_(variables, root_rank, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """RuntimeError: only graphs of TensorFlow 1 have global variables."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() is for graphs of TensorFlow 1; call hvd.broadcast_variables(variables, "
        f"root_rank={root_rank}) with the variables of your model and of its optimizer"
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks."""
    _check_session(session)
    return hvd.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts the object it is given."""
    _check_session(session)
    return functools.partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    _check_session(session)
    return hvd.allgather_object(obj, name, process_set)


def _check_session(session: object) -> None:
    if session is not None:
        raise ValueError("session=… is of TensorFlow 1: leave it out, tensors have values without one")
