"""Hora under torch.distributed: `init_process_group("hora")`. Importing this is not needed where Hora is installed."""

from __future__ import annotations

from hora.torch.distributed.group import HoraProcessGroup
from hora.torch_backend import register

__all__ = ["HoraProcessGroup", "register"]

register()
