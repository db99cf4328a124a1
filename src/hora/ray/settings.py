"""The settings of an executor, where it is not given Horovod's own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hora.legacy.runner import Timeout, make_secret_key

__all__ = ["MiniSettings"]


@dataclass
class MiniSettings:
    """`timeout_s`: for starting up; `placement_group_timeout_s`: for Ray to find room. `nics`: interfaces to use.

    `key` is what other programs expect to find here. Hora's jobs have secrets of their own, made for each.
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> Timeout:
        """A limit that begins now."""
        return Timeout(
            self.timeout_s,
            message="Timed out waiting for {activity}. Check that the nodes can reach one another, or raise timeout_s.",
        )
