"""Host lists and the places of ranks."""

from hora.launch.slots import (
    INVALID_SLOT_INFO,
    HostInfo,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
    parse_hosts_and_slots,
)
from hora.launch.slots import Slot as SlotInfo

__all__ = [
    "INVALID_SLOT_INFO",
    "HostInfo",
    "SlotInfo",
    "get_host_assignments",
    "parse_host_files",
    "parse_hosts",
    "parse_hosts_and_slots",
]
