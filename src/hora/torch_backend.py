"""Registration of the backend "hora" in torch.distributed.

torch calls `register` when it is imported (the entry point `torch.backends`), so this module imports nothing else;
`hora.torch.distributed` is imported when a process group is created. From 2.14 on, torch also calls `register` when a
program names the backend (`torch.distributed.backends`), even with TORCH_DEVICE_BACKEND_AUTOLOAD=0.

`env://`, torch's default way to meet, knows torchrun's variables alone, and opens a store on all addresses that needs
no secret. Under Hora's launchers the store is at their authenticated rendezvous instead. Under mpirun and srun, which
set other variables, a process finds its place as `hvd.init()` does.

`replace_gloo`, or HORA_REPLACE_GLOO=1 in the environment, is for programs with a hard-coded backend: a group that
requests only gloo is created with Hora, and keeps gloo's name for code that inspects it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

_GLOO = "gloo"


def register() -> None:
    """Register the backend once; does nothing if torch was built without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if not hasattr(dist.Backend, "HORA"):
        dist.Backend.register_backend("hora", _create, extended_api=True, devices=["cpu", "cuda"])
    _read_variables_of_launchers()
    wish = os.environ.get("HORA_REPLACE_GLOO", "0")
    if wish not in ("", "0", "1"):
        raise ValueError(f"HORA_REPLACE_GLOO must be 0 or 1, but it is {wish!r}")
    if wish == "1":
        replace_gloo()


def _create(options: Any, backend_options: Any) -> Any:
    from hora.engine import current_runtime
    from hora.torch.distributed.creation import create
    from hora.torch.protection.automatic import watch_models

    made = create(options, backend_options, hooked=_calls_are_hooked())
    watch_models(current_runtime().world)
    return made


def _calls_are_hooked() -> bool:
    """Return whether the user wants torch's hooks around every call: its flight recorder or its check for NaN.

    torch 2.15 attaches the recorder by default, which makes a small call half as slow again, to the groups whose
    backend does not record by itself. Ours does in its own way, so it is left out unless a variable asks for it.
    """
    sizes = (os.environ.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    wanted = next(filter(None, sizes), "0")
    records = wanted.isdecimal() and int(wanted) > 0
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    recording: set[str] = getattr(torchs, "_FR_SELF_RECORDING_BACKENDS", set())  # a torch without it attaches none
    (recording.discard if records else recording.add)("hora")
    return records or os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"


def _read_variables_of_launchers() -> None:
    # No public way exists to replace a handler. A torch without this one must still be importable.
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original = handlers.get("env")
    if original is None or hasattr(original, "of_torch"):
        return

    @functools.wraps(original)
    def with_launchers(url: str, *args: Any, **named: Any) -> Any:
        from hora.platforms.detect import detect_world

        if "rank=" in url:
            return original(url, *args, **named)
        if _is_rank_of_ours():
            return _meet(detect_world(), *args, **named)
        if "RANK" in os.environ or (world := detect_world()).launcher == "none":
            return original(url, *args, **named)
        return _meet(world, *args, **named)

    with_launchers.of_torch = original  # type: ignore[attr-defined]
    handlers["env"] = with_launchers


def _is_rank_of_ours() -> bool:
    """Return whether Hora started this very process as the rank that torch's variables name."""
    env = os.environ
    if "HORA_JOB" not in env or "TORCHELASTIC_RUN_ID" in env or multiprocessing.parent_process() is not None:
        return False
    return env.get("HOROVOD_RANK") == env.get("RANK") and env.get("HOROVOD_SIZE") == env.get("WORLD_SIZE")


def _meet(world: Any, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, this process's rank, and the number of ranks (a rendezvous handler of torch)."""
    from datetime import timedelta

    from hora.engine import current_place, is_newcomer
    from hora.engine.rendezvous import open_torch_store

    world = current_place(world)
    if os.environ.get("HORA_ELASTIC_PER_STEP"):  # whatever the backend is: models of others are refused
        from hora.torch.protection.automatic import watch_models

        watch_models(world)
    if is_newcomer(world):  # alone
        from torch._C._distributed_c10d import HashStore

        yield HashStore(), 0, 1
        return
    store = open_torch_store(world, limit_s=(timeout or timedelta(minutes=30)).total_seconds())
    yield store, world.rank, world.size


def replace_gloo() -> None:
    """Create process groups of this process with Hora if a program requests gloo."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d._new_process_group_helper
    if hasattr(original, "of_torch"):
        return

    @functools.wraps(original)
    def with_hora(
        group_size: int,
        group_rank: int,
        ranks: Any,
        backend: Any,
        store: Any,
        group_name: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        if not _means_gloo(backend):
            return original(group_size, group_rank, ranks, backend, store, group_name, *others, **named)
        if not ranks and group_rank == 0:
            print("hora: this job asked for gloo and runs on Hora (HORA_REPLACE_GLOO=1)", flush=True)
        made = original(group_size, group_rank, ranks, c10d.Backend("hora"), store, group_name, *others, **named)
        group, prefix_store = made
        if hasattr(group, "profile_name"):
            group.profile_name = _GLOO
        if prefix_store is not None:
            c10d._world.pg_map[group] = (c10d.Backend(_GLOO), prefix_store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(_GLOO)))
        return made

    with_hora.of_torch = original  # type: ignore[attr-defined]
    setattr(c10d, original.__name__, with_hora)


def _means_gloo(backend: Any) -> bool:
    """Return whether gloo is the only requested backend, or the only one possible on this machine."""
    import torch
    from torch.distributed.distributed_c10d import BackendConfig

    by_device = BackendConfig(backend).get_device_backend_map()
    if not torch.cuda.is_available():
        by_device = {device: name for device, name in by_device.items() if device != "cuda"} or by_device
    return set(map(str, by_device.values())) == {_GLOO}
