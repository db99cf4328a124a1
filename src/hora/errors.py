"""All exceptions that a user can see. They survive pickling, because workers send them to the caller."""

from __future__ import annotations

import sys

__all__ = [
    "AuthenticationError",
    "BadCallError",
    "DriftError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "JobFailedError",
    "ModelFileError",
    "StartTimeoutError",
    "get_version_mismatch_message",
]


class HorovodInternalError(RuntimeError):
    """A collective could not complete: a peer is lost, ranks disagree, or the runtime has been shut down.

    Elastic training catches it, restores the last commit and continues.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts changed; an elastic loop re-initializes. `skip_sync`: only removals, state is current."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return f"the set of hosts was updated (skip_sync={self.skip_sync})"


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of a `HorovodVersionMismatchError`."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}.\n"
        f"This can result in unexpected behavior including runtime errors.\n"
        f"Reinstall Hora in an environment whose {name} version stays the same."
    )


class HorovodVersionMismatchError(ImportError):
    """The framework in use is not the one that the package was installed for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (str(self.name), self.version, self.installed_version)


class BadCallError(TypeError, ValueError):
    """A function cannot be called with these arguments: Python's message, raised before anything starts."""


class DriftError(ValueError):
    """The ranks no longer train the same model; names the ranks, the step and what differs."""


class AuthenticationError(ConnectionError):
    """A peer on the control plane did not prove that it holds the job's secret."""


class ModelFileError(ValueError):
    """A saved model is damaged, modified, of another kind, or does not fit the network."""


class StartTimeoutError(TimeoutError):
    """Workers did not start, or did not meet, within the start timeout."""


class JobFailedError(RuntimeError):
    """A worker of a job failed. Has its rank, exit code, traceback and the end of its output, and one line for all."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
        remote_traceback: str | None = None,
        log_tail: str | None = None,
        headline: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail
        self.headline = headline
        self.advice = ""  # what to change, if the place where the job was started knows it

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of this error: the rank's own traceback, the last line last, and none of ours.

        IPython calls it. `%debug`, `traceback.print_exc()` and a log still have all frames.
        """
        text = self.remote_traceback
        if not text:
            return [f"JobFailedError: {self}"]
        for file, number in _cells().items():
            text = text.replace(f'File "{file}"', f"Cell In[{number}]")
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        return [
            f"JobFailedError: {who} of the job has failed:",
            "",
            *(text.rstrip() + self.advice.rstrip()).splitlines(),
        ]


def _cells() -> dict[str, int]:
    """Return the number of each cell of this notebook by the name that its code has as a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return dict(getattr(getattr(shell, "compile", None), "_filename_map", None) or {})
