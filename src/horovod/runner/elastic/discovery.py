"""Objects that say which hosts there are. Re-exports only."""

from hora.horovod.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]
