"""`horovod.runner.elastic.discovery`: objects that say which hosts there are, for programs that bring their own."""

from __future__ import annotations

from collections.abc import Mapping

from hora.launch.control.discovery import DiscoveryScript

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery:
    """Interface that names the current hosts and the slots of each."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A program that prints `host` or `host:slots` lines. RuntimeError when it fails."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = DiscoveryScript(discovery_script, default_slots=slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {host.hostname: host.slots for host in self._script.ask()}


class FixedHosts(HostDiscovery):
    """Hosts that change only when the program says so."""

    def __init__(self, available_host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(available_host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(available_host_slots)
