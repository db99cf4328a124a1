"""`Endpoint`: this rank's end of a process group, under torch's names, but not yet of a class of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hora.engine import Runtime
from hora.engine.queue import OperationQueue
from hora.torch.distributed.collectives import Collectives
from hora.torch.distributed.live import forget
from hora.torch.distributed.signatures import Options


class Endpoint(Collectives):
    """The collectives, with the properties, subgroups and the end of a group. `make` creates one of its subgroups."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        runtime: Runtime,
        queue: OperationQueue,
        timeout: timedelta,
        on_shutdown: Callable[[], None] | None,
        make: Callable[..., Any],
    ) -> None:
        super().__init__(rank, size, runtime, queue, timeout)
        self._store = store
        self._on_shutdown, self._make = on_shutdown, make

    profile_name = "hora"  # "gloo" if it stands in for it

    # Properties that torch reads.

    def getBackendName(self) -> str:
        return "hora"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    @property
    def options(self) -> Options:
        """The group's options, as torch reads a backend's."""
        found = Options(self.getBackendName(), self._timeout)
        found.global_ranks_in_group = list(self._ranks)
        return found

    def get_error(self) -> Any:
        """Return why the group cannot be used any more, as torch's `ErrorType`."""
        if self._queue.status.broken:  # the group's own: it ends before the world does, and may outlive that
            return c10d.ErrorType.COMM_ERROR
        return c10d.ErrorType.TIMEOUT if self._has_timed_out else c10d.ErrorType.SUCCESS

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Call this function before calls in flight are abandoned, by `abort` or a timeout."""
        self.abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.abort_hooks.pop(hook_id, None)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether torch may ask for memory here: it may not."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._limit_s)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def get_group_store(self) -> Any:
        return self._store

    # Subgroups.

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Return a group of these members (collective among them); None on a rank that is not one of them."""
        outside = [member for member in ranks if not 0 <= member < self._size]
        if outside or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"split_group on rank {self._own_rank}: the ranks must be different members, 0 to "
                f"{self._size - 1}, but they are {list(ranks)}"
            )
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/split{list(ranks)}"
        store = dist.distributed_c10d.PrefixStore(f"{name}/", self._store)
        global_ranks = [self._ranks[member] for member in ranks]
        member, limit = list(ranks).index(self._rank), timeout or self._timeout
        part = self._make(name, store, member, len(ranks), limit, global_ranks)
        part.setGroupName(name)
        part.setGroupDesc(group_desc or "")
        return part

    def among(self, ranks: Sequence[int]) -> Any:
        """Return a new group of these ranks of the job, of which this is one (collective among them)."""
        name = f"{self._name}/among{list(ranks)}"
        return self._make(name, None, list(ranks).index(self._own_rank), len(ranks), self._timeout, ranks)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: members are connected from the start."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a subgroup take no part in its creation."""

    # Shutdown.

    def shutdown(self) -> None:
        """Leave the group. The default group of a process that has not called `hvd.init()` ends the engine."""
        forget(self)
        if self._runtime.is_current:
            self._runtime.sets.remove_group(self._queue.process_set_id)
            if self._on_shutdown is not None:
                self._on_shutdown()

    def abort(self) -> None:
        """Fail all operations in flight in this group, on this rank."""
        self.run_abort_hooks()
        self._queue.abandon(f"{self._label('process group')} was aborted by rank {self._own_rank}")
        self.shutdown()
