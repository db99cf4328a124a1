"""`HoraProcessGroup`: the engine as a process group of torch.distributed, and as a whole group for torch.

Before 2.14, torch has no other shape for a backend in Python. From 2.14 on a backend serves one device, and every call
goes through torch's dispatcher to it. The group stays in front of its backend: it takes the short way unless somebody
watches (`Observed`), and returns our own `Work`, of which C++ would pass on only `wait` and `get_future`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hora.torch.distributed.backend import HoraBackend, wrapped_for_debugging
from hora.torch.distributed.observed import Observed
from hora.torch.distributed.reconfigure import Reconfigurable
from hora.torch.distributed.shape import HAS_BACKENDS

_BASE: Any = dist.ProcessGroup


class HoraProcessGroup(Reconfigurable, Observed, _BASE):
    """This rank's end of a process group."""

    def __init__(self, store: Any, rank: int, size: int, *others: Any) -> None:
        # Torch's C++ keeps the store of a group that has backends.
        _BASE.__init__(self, *([store] if HAS_BACKENDS and store is not None else []), rank, size)
        Observed.__init__(self, store, rank, size, *others)
        if HAS_BACKENDS:
            self._set_default_backend(_BASE.BackendType.CUSTOM)

    def attach(self, name: str, *, watched: bool) -> None:
        """Give the group its name and, where torch has backends, its backend. `watched`: torch will watch all calls."""
        self.setGroupName(name)
        if HAS_BACKENDS:
            self.backend = HoraBackend(self)
            backend = self.backend if self._store is None else wrapped_for_debugging(self.backend, self._store, name)
            if watched or backend is not self.backend:
                self.watchers.add("torch")
            for device in ("cpu", "cuda"):
                self._register_backend(torch.device(device), _BASE.BackendType.CUSTOM, backend)

    if not HAS_BACKENDS:

        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device("cpu")]

        def _get_backend(self, device: torch.device) -> HoraProcessGroup:
            return self
