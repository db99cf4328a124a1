"""`ray_logger.log` for training functions, and its delivery to callbacks in the driver.

Values go through a `ray.util.queue.Queue` on the driver's node. `log` returns once its value is in the queue, so
everything logged before the function returns is delivered before the executor's `run` returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Callback = Callable[[Any], object]

warning_raised = False
_queue: Any = None
_END = "hora.ray: no more"
_DELIVERY_LIMIT_S = 60.0
_PLACEMENT_LIMIT_S, _PLACEMENT_PAUSE_S = 30.0, 0.2

_log = logging.getLogger("hora.ray")


def configure(queue: Any) -> None:
    """Set the queue of `log`."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Send these values to the callbacks of the executor's `run`. Warns once if there are none."""
    global warning_raised
    if _queue is not None:
        _queue.put(info_dict)
    elif not warning_raised:
        warning_raised = True
        warnings.warn(
            "ray_logger.log has no effect here: the executor's run() has no callbacks", UserWarning, stacklevel=2
        )


@contextlib.contextmanager
def queue_for(callbacks: Sequence[Callback] | None) -> Iterator[Any]:
    """Yield a queue whose values go to the callbacks, in this process, one after another; None without callbacks."""
    if not callbacks:
        yield None
        return
    queue = _queue_on_this_node()
    thread = threading.Thread(target=_deliver, args=(queue, callbacks), name="hora-ray-callbacks", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            queue.put(_END)
            thread.join(_DELIVERY_LIMIT_S)
            queue.shutdown(force=True)


def _queue_on_this_node() -> Any:
    if ray.util.client.ray.is_connected():  # this process is on no node
        return Queue(actor_options={"num_cpus": 0})
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    deadline = time.monotonic() + _PLACEMENT_LIMIT_S
    while True:
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        try:
            queue.empty()
        except ray.exceptions.ActorUnschedulableError:
            # Ray let a new node place it, which does not know this node yet. `soft=True` would leave it there.
            if time.monotonic() > deadline:
                raise
            time.sleep(_PLACEMENT_PAUSE_S)
        else:
            return queue


def _deliver(queue: Any, callbacks: Sequence[Callback]) -> None:
    failed: set[int] = set()
    while True:
        try:
            value = queue.get()
        except Exception:  # Ray was shut down, or the queue's node is gone: nothing is left to deliver
            return
        if isinstance(value, str) and value == _END:
            return
        for number, callback in enumerate(callbacks):
            try:
                callback(value)
            except Exception:  # a user's callback must not affect the others
                if number not in failed:
                    _log.exception("the callback %r failed (logged once)", callback)
                failed.add(number)
