"""Synchronize state between ranks: broadcast variables and objects from a root, gather objects from all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hora.torch as hvd
from hora.tensorflow.ops import broadcast_
from hora.torch.process_sets import ProcessSet, global_process_set

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assign the root's values to the variables (always in place). Raises ValueError if ranks' variables differ.

    In the graph of a session, returns the operation that does so and matches variables by name.

    Args:
        variables: The variables to be overwritten with the root's values.
        root_rank: The rank whose value everyone gets.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        inplace: Write into the variables' own memory.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        broadcast_(variables, root_rank, process_set=process_set)
        return None
    if not variables:
        return tf.no_op()
    return tf.group(*broadcast_(sorted(variables, key=lambda v: str(v.name)), root_rank, process_set=process_set))


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that assigns the root's values to all global variables of the graph.

    Args:
        root_rank: The rank whose value everyone gets.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs, and eager execution is on; call "
            f"hvd.broadcast_variables(variables, root_rank={root_rank}) with the variables of your model and of its "
            "optimizer"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


_SessionRunHook: Any = tf.compat.v1.train.SessionRunHook


class BroadcastGlobalVariablesHook(_SessionRunHook):
    """Broadcasts all global variables after a session was created or has restored a checkpoint.

    `device`: where the operation is placed.

    Args:
        root_rank: The rank whose value everyone gets.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph before the session finalizes it."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks, immediately; no session is needed.

    Args:
        obj: Any object that pickles.
        root_rank: The rank whose value everyone gets.
        session: Accepted for Horovod's sake: a session of TensorFlow 1.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return hvd.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts its argument.

    Args:
        root_rank: The rank whose value everyone gets.
        session: Accepted for Horovod's sake: a session of TensorFlow 1.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return functools.partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: Any object that pickles.
        session: Accepted for Horovod's sake: a session of TensorFlow 1.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return hvd.allgather_object(obj, name, process_set)
