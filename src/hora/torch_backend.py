"""The name "hora" among the backends of torch.distributed.

torch calls `register` when it is imported (the entry point `torch.backends`), so nothing else is imported here: the
backend itself, `hora.torch.distributed`, is imported when a process group is made.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register the backend, unless it is; harmless in a torch that was built without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "HORA"):
        return
    dist.Backend.register_backend("hora", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from hora.torch.distributed.creation import create

    return create(options, backend_options)
