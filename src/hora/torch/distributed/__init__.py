"""The backend `init_process_group("hora")` of torch.distributed. torch imports it by itself if Hora is installed."""

from __future__ import annotations

from hora.torch.distributed.group import HoraProcessGroup
from hora.torch_backend import register

__all__ = ["HoraProcessGroup", "register"]

register()
