"""The loop around an elastic training function.

synchronize -> train -> done
                 |-- HorovodInternalError: back to the last commit, or the last step -+
                 |-- HostsUpdatedInterrupt: keep the current state -------------------+-> new world, and again

Without an elastic launcher the new world is the old one. An error that breaks it repeatedly before a commit is
permanent and is raised.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hora import engine
from hora.errors import HorovodInternalError, HostsUpdatedInterrupt
from hora.torch.basics import restart
from hora.torch.elastic.state import State, notification_manager

log = logging.getLogger("hora")

Training = Callable[..., Any]

_NUM_ATTEMPTS = 3  # without progress, in a world that does not change

reset = restart


def run(func: Training) -> Training:
    """Make `func(state, ...)` elastic: it is called again in the new world whenever the world changes."""
    return run_fn(func, reset)


def is_elastic() -> bool:
    """Return whether ranks may join and leave: the job was started with a minimum number of ranks."""
    return engine.is_initialized() and engine.has_elastic_launcher()


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Make a function elastic with a custom `reset`, for other frameworks.

    Args:
        func: The function; it travels with what it refers to (cloudpickle) where ranks are started for it.
        reset: Called after the world has changed, before the function is called again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        # Only a call: a notebook's function is pickled together with this one and everything it names.
        return _loop(func, reset, state, args, kwargs)

    return wrapper


@contextlib.contextmanager
def _errors_of_the_world() -> Iterator[None]:
    """Raise HorovodInternalError for an error that C++ code of torch, such as DDP's, made of one in a world that ended.

    A rank may hear of a death from another survivor that leaves the world: then it is closed, not broken.
    """
    try:
        yield
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        if engine.is_initialized() and not engine.current_runtime().status.is_open:
            raise HorovodInternalError(engine.current_runtime().status.reason) from error
        raise


def _clear_frames(error: BaseException) -> None:
    """Release what the failed call had in its local variables, such as its model: operations keep their errors."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _loop(
    func: Training, reset: Callable[[], None], state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if not state.enter():
        return func(state, *args, **kwargs)
    if engine.is_newcomer():  # everything is loaded and created: interrupt the others now, at a commit
        reset()
        state.on_reset()
    notification_manager.init()
    notification_manager.register_listener(state)
    skip_sync = False
    num_futile, reached = 0, state._progress()
    try:
        while True:
            try:
                if not skip_sync:
                    state.sync()
                with _errors_of_the_world():
                    result = func(state, *args, **kwargs)
                state.end_together()
                state.flush()
                return result
            except HorovodInternalError as error:
                num_futile = num_futile + 1 if state._progress() == reached else 1
                reached = state._progress()
                if num_futile >= _NUM_ATTEMPTS and not engine.has_elastic_launcher():
                    raise HorovodInternalError(
                        f"{error}; the world broke {num_futile} times in a row before a commit, and no elastic "
                        "launcher (horovodrun --min-np) is running to change it"
                    ) from error
                log.warning(
                    "the world broke, going back to the last %s: %s", "step" if state.per_step else "commit", error
                )
                _clear_frames(error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as update:
                # `sync` sends the plain values that were saved last: save the current ones, or they revert.
                state.save()
                skip_sync = update.skip_sync and not state.per_step
            reset()
            state.on_reset()
            notification_manager.init()
    finally:
        notification_manager.remove_listener(state)
