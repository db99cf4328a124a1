"""State that can be committed, restored and synchronized; independent of torch.

save      keep the current values in memory
restore   go back to the values saved last
sync      copy rank 0's values to all ranks
commit    save, then check whether hosts have changed or the job is to end
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hora import engine
from hora.errors import HostsUpdatedInterrupt
from hora.telemetry.meters import meter

_LEFT = 75  # EX_TEMPFAIL: the launcher may start the process again


class HostUpdateResult:
    """Flags for changes of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
    leave = 4  # the whole job is to end


class NotificationManager:
    """Passes notifications to listeners. One per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[State] = []
        self._client: object = None
        self._latest: dict[str, Any] | None = None

    def init(self) -> None:
        """Subscribe, once per control connection; called again after every change of the world."""
        client = engine.control_connection()
        with self._lock:
            known, self._client = self._client, client
        if client is not None and client is not known:
            client.on_notice(self._on_notice)
        elif self._latest is not None:
            # A notice about a new generation may arrive while its members still reset, which discards all notices.
            self._on_notice(self._latest)

    @property
    def has_listeners(self) -> bool:
        """Return whether a loop in this process would be notified."""
        return bool(self._listeners)

    def register_listener(self, listener: State) -> None:
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: State) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Notify every listener."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _on_notice(self, notice: dict[str, Any]) -> None:
        if notice.get("notice") != "hosts_updated":
            return
        self._latest = notice
        generation = engine.current_runtime().world.generation if engine.is_initialized() else -1
        if notice.get("generation", generation) == generation:
            self.handle_hosts_updated(int(notice["timestamp"]), int(notice["change"]))


notification_manager = NotificationManager()


class State:
    """Base of all states; subclasses define `save`, `restore` and `sync`."""

    per_step = False  # a failure costs the current step, not everything since the last commit
    _num_commits = 0

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def enter(self) -> bool:
        """Hook for subclasses: called before the elastic loop. Returns False if the function is to be called once,
        without it.
        """
        return True

    def _progress(self) -> int:
        """Return a count of the progress that a failure cannot undo."""
        return self._num_commits

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call after every change of the world, before the next `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a change of the world: drop old notifications, then call `reset` and the callbacks in order."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Record that hosts were added or removed. Called on another thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then raise HostsUpdatedInterrupt on all ranks together if rank 0 knows of new hosts.

        If the job is to end, all ranks exit here: SystemExit with status 75, "start it again".
        """
        with meter.checkpointing():
            self.save()
            self._num_commits += 1
            self._write_down()
        if self._rank() == 0:
            meter.commit(f"commit at step {meter.num_steps}", flush=self.flush)
        self.check_host_updates()

    def _write_down(self) -> None:
        """Persist the saved values outside this process, if configured."""

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks together if rank 0 knows of new hosts (collective)."""
        before = self._last_updated_timestamp
        changes = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                changes |= change
        before, latest, changes = self._agree((before, self._last_updated_timestamp, changes))
        self._last_updated_timestamp = latest
        if latest > before and changes & HostUpdateResult.leave:
            self.flush()
            raise SystemExit(_LEFT)
        if latest > before:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def _agree(self, view: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return rank 0's view."""
        agreed: tuple[int, int, int] = self._bcast_object(view)
        return agreed

    def save(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define save()")

    def restore(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define restore()")

    def sync(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define sync()")

    def reset(self) -> None:
        """Hook for subclasses: called first after a change of the world."""

    def end_together(self) -> None:
        """Hook for subclasses: called when this rank's training is over, before `flush`; others may still train."""

    def flush(self) -> None:
        """Hook for subclasses: called when the training is over."""


class ObjectState(State):
    """Plain values as attributes: `ObjectState(bcast, rank, epoch=0, batch=0)`."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Copy the values that rank 0 saved last."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)
