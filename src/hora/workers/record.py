"""Public record of a worker: a dict with the keys of Cloudera's worker API, and a few more.

scheduling -> running -> succeeded | failed | stopped
scheduling -> failed (it could not be started)
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from hora.launch.controller.output import Tail

__all__ = ["TERMINAL", "Record", "new_id"]

TERMINAL = frozenset(("succeeded", "failed", "stopped", "timedout"))
_ALPHABET = string.ascii_lowercase + string.digits
_TAIL_LINES = 20


def new_id() -> str:
    """Return a new worker id: 16 lower-case letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(16))


def _iso(moment: float | None) -> str | None:
    if moment is None:
        return None
    text = datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


@dataclass
class Record:
    """Record of one worker."""

    id: str
    index: int
    name: str
    ip_address: str
    cpu: float
    memory: float
    nvidia_gpu: int
    created_at: float
    status: str = "scheduling"
    running_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    message: str = ""
    app_port: int = 0
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    tail: Tail = field(default_factory=Tail, repr=False)  # the end of its output

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def _app_url(self) -> str:
        # Web applications listen on 127.0.0.1, as the original tells them to, not on the worker's own loopback address.
        host = "127.0.0.1" if self.ip_address.startswith("127.") else self.ip_address
        return f"http://{host}:{self.app_port}/"

    def to_dict(self, now: float) -> dict[str, Any]:
        begun = self.running_at
        return {
            "id": self.id,
            "index": self.index,
            "name": self.name,
            "status": self.status,
            "ip_address": self.ip_address if self.status == "running" or self.ended else "unknown",
            "app_url": self._app_url,
            "created_at": _iso(self.created_at),
            "running_at": _iso(self.running_at),
            "finished_at": _iso(self.finished_at),
            "duration": 0.0 if begun is None else (self.finished_at or now) - begun,
            "cpu": self.cpu,
            "memory": self.memory,
            "nvidia_gpu": self.nvidia_gpu,
            "gpus": list(self.gpus),
            "exit_code": self.exit_code,
            "message": self.message,
            "log_tail": self.tail.text.splitlines()[-_TAIL_LINES:],
        }
