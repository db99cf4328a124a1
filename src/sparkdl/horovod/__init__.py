"""Functions with which a training communicates with the driver. Re-exports only."""

from __future__ import annotations

from hora.launch.driver_log import log_to_driver

__all__ = ["log_to_driver"]
