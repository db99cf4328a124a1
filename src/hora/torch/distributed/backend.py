"""`HoraBackend`: what torch's C++ calls for the tensors of one device, from torch 2.14 on.

It forwards to the `Endpoint` that has the collectives: that of the group in front of it, or in a group of several
backends ("cpu:hora,cuda:nccl") an endpoint of its own, to which all calls come through torch's dispatcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hora.torch.distributed.endpoint import Endpoint
from hora.torch.distributed.observed import TITLES, record_call
from hora.torch.distributed.signatures import Options

_BASE: Any = c10d.Backend


class _Last(threading.local):
    """The last work that C++ has been given in this thread. C++ passes on a holder of it, which knows less."""

    work: Any = None


class HoraBackend(_BASE):
    """The backend of an endpoint, for its calls from torch's dispatcher."""

    def __init__(self, endpoint: Endpoint) -> None:
        _BASE.__init__(self, endpoint.getRank(), endpoint.getSize())
        self._endpoint = endpoint
        self.last = _Last()

    supports_splitting = True
    supports_coalescing = False
    _supports_time_estimate = False

    def getBackendName(self) -> str:
        return self._endpoint.getBackendName()

    @property
    def options(self) -> Options:
        return self._endpoint.options

    def get_error(self) -> Any:
        return self._endpoint.get_error()

    def supports_tensor_alloc(self, device: object) -> bool:
        return False

    def rank(self) -> int:
        return self._endpoint.getRank()

    def size(self) -> int:
        return self._endpoint.getSize()

    @property
    def supports_reconfigure(self) -> bool:
        return bool(getattr(self._endpoint, "supports_reconfigure", False))

    def get_reconfigure_handle(self) -> str:
        handle: str = self._endpoint.get_reconfigure_handle()  # type: ignore[attr-defined]
        return handle

    def reconfigure(self, opts: Any) -> Any:
        return self._endpoint.reconfigure(opts)  # type: ignore[attr-defined]

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        self._endpoint.register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._endpoint.unregister_abort_hook(hook_id)

    def set_timeout(self, timeout: timedelta) -> None:
        self._endpoint.set_timeout(timeout)

    def eager_connect_single_device(self, device: object) -> None:
        """Do nothing: members are connected from the start."""

    def perform_nocolor_split(self, device: object) -> None:
        """Do nothing: ranks outside a subgroup take no part in its creation."""

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> HoraBackend:
        """Return the backend of a subgroup, to one of its members."""
        part = self._endpoint.split_group(ranks, options.timeout, group_name=options.group_name)
        return HoraBackend(part)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        timeout = opts.timeout if opts.timeout > timedelta(0) else None
        self._endpoint.monitored_barrier(timeout, wait_all_ranks)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._endpoint._get_sequence_number_for_group()

    def abort(self) -> None:
        Endpoint.abort(self._endpoint)

    def shutdown(self) -> None:
        Endpoint.shutdown(self._endpoint)


def _forward(name: str) -> Callable[..., Any]:
    call = getattr(Endpoint, name)

    def method(self: HoraBackend, *given: Any, **named: Any) -> Any:
        self.last.work = work = record_call(name, call, self._endpoint, given, named)
        return work

    return method


for _name in TITLES:
    setattr(HoraBackend, _name, _forward(_name))


def wrapped_for_debugging(backend: HoraBackend, store: Any, name: str) -> Any:
    """Return the backend, or torch's wrapper around it that checks each call with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    torchs: Any = dist.distributed_c10d
    if c10d.get_debug_level() != c10d.DebugLevel.DETAIL or not torchs.is_gloo_available():
        return backend
    return torchs._create_process_group_wrapper(
        wrapped_pg=backend,
        store_prefix=name,
        store=store,
        rank=backend.rank(),
        world_size=backend.size(),
        timeout=backend.options._timeout,
    )
