"""Reports of a worker's failure: the texts and the exception that the caller of a job gets."""

from __future__ import annotations

import signal

from hora.errors import JobFailedError
from hora.launch.controller.policy import Failure
from hora.launch.controller.rendezvous import ErrorReport

__all__ = ["job_failed", "signal_text"]

_TAIL_LINES = 30


def signal_text(code: int) -> str:
    """A death by signal, in words; empty for other exit codes."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    hint = "; if nobody sent it, the machine has probably run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def job_failed(
    failure: Failure, *, name: str, rank: int | None, preface: str, report: ErrorReport | None, tail: str, shown: bool
) -> JobFailedError:
    """Return the exception for the caller. `name`: the process's; `tail`: the end of its output.

    `shown`: the console has the output already, so that the message repeats its last line alone.
    """
    message = _message(name, failure, report, tail.rstrip().splitlines()[-1 if shown else -_TAIL_LINES :])
    error = JobFailedError(
        f"{preface}\n{message}" if preface else message,
        rank=rank,
        exit_code=failure.code,
        remote_traceback=report.traceback if report else None,
        log_tail=tail,
    )
    error.__cause__ = _cause(report)
    return error


def _message(name: str, failure: Failure, report: ErrorReport | None, tail: list[str]) -> str:
    """Compose the message about the process that failed first."""
    parts = [
        "Horovod detected that one or more processes exited with non-zero status. The first one to fail was:",
        f"Process name: {name}",
        f"Exit code: {failure.code}",
    ]
    if failure.reason and report is None:
        parts.append(f"Reason: {failure.reason}")
    if report is not None:
        parts.append(f"What it raised:\n{report.traceback.rstrip()}")
    elif tail:
        title = "The last line of its output" if len(tail) == 1 else "The end of its output"
        parts.append(f"{title}:\n" + "\n".join(f"  {line}" for line in tail))
    return "\n".join(parts) + "\n"


def _cause(report: ErrorReport | None) -> BaseException | None:
    """The worker's own exception: of a function that the caller sent there, and so trusts. Commands report none."""
    if report is None or not report.pickled:
        return None
    import cloudpickle

    try:
        found = cloudpickle.loads(report.pickled)
    except Exception as error:  # the class is the user's: its constructor may do anything
        found = RuntimeError(f"{report.type_name}: {report.message} (it cannot be rebuilt here: {error})")
    return found if isinstance(found, BaseException) else None
