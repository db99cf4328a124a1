"""`ray_logger.log` in a training function, and the callbacks in the driver that get what was logged.

The values go through a `ray.util.queue.Queue` on the driver's node. A worker has put its value there before `log`
returns, so everything that was logged before the function returned is delivered before the executor's `run` does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["configure", "log", "queue_for", "warning_raised"]

Callback = Callable[[Any], object]

warning_raised = False
_queue: Any = None
_END = "hora.ray: no more"
_DELIVERY_LIMIT_S = 60.0

_log = logging.getLogger("hora.ray")


def configure(queue: Any) -> None:
    """Have `log` put its values here."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Give these values to the callbacks of the executor's `run`. Without any, one warning is all that happens."""
    global warning_raised
    if _queue is not None:
        _queue.put(info_dict)
    elif not warning_raised:
        warning_raised = True
        warnings.warn(
            "ray_logger.log has no effect here: the executor's run() was given no callbacks", UserWarning, stacklevel=2
        )


@contextlib.contextmanager
def queue_for(callbacks: Sequence[Callback] | None) -> Iterator[Any]:
    """A queue whose values are given to the callbacks, in this process, one after another; None without callbacks."""
    if not callbacks:
        yield None
        return
    # Under Ray Client this process is on no node.
    here = None if ray.util.client.ray.is_connected() else ray.get_runtime_context().get_node_id()
    strategy = {} if here is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}
    queue = Queue(actor_options={"num_cpus": 0, **strategy})
    thread = threading.Thread(target=_deliver, args=(queue, callbacks), name="hora-ray-callbacks", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        with contextlib.suppress(Exception):  # whatever has become of Ray in the meantime
            queue.put(_END)
            thread.join(_DELIVERY_LIMIT_S)
            queue.shutdown(force=True)


def _deliver(queue: Any, callbacks: Sequence[Callback]) -> None:
    failed: set[int] = set()
    while True:
        try:
            value = queue.get()
        except Exception:  # Ray was shut down, or the queue's node is gone: there is nothing to deliver any more
            return
        if isinstance(value, str) and value == _END:
            return
        for number, callback in enumerate(callbacks):
            try:
                callback(value)
            except Exception:  # a callback of the user's must not keep the others from theirs
                if number not in failed:
                    _log.exception("the callback %r failed (logged once)", callback)
                failed.add(number)
