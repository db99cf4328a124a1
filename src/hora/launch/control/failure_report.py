"""How a worker's failure is told: the texts and the exception that the caller of a job gets. Called by controllers."""

from __future__ import annotations

import signal

from hora.launch.control.rendezvous import ErrorReport

__all__ = ["cause", "failure_message", "signal_text"]

_TAIL_LINES = 30


def signal_text(code: int) -> str:
    """A death by signal, in words; empty for other exit codes."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    hint = "; if nobody sent it, the machine has probably run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def failure_message(name: str, code: int, reason: str, report: ErrorReport | None, tail: str) -> str:
    """What the caller is told of the process that failed first. `tail`: the end of its output."""
    parts = [
        "Horovod detected that one or more processes exited with non-zero status. The first one to fail was:",
        f"Process name: {name}",
        f"Exit code: {code}",
    ]
    if reason and report is None:
        parts.append(f"Reason: {reason}")
    if report is not None:
        parts.append(f"What it raised:\n{report.traceback.rstrip()}")
    elif tail.strip():
        lines = tail.rstrip().splitlines()[-_TAIL_LINES:]
        parts.append("The end of its output:\n" + "\n".join(f"  {line}" for line in lines))
    return "\n".join(parts) + "\n"


def cause(report: ErrorReport | None) -> BaseException | None:
    """The worker's own exception. It comes from a worker that proved to hold the job's secret."""
    if report is None or not report.pickled:
        return None
    import cloudpickle

    try:
        found = cloudpickle.loads(report.pickled)
    except Exception as error:  # the class is the user's: its constructor may do anything
        found = RuntimeError(f"{report.type_name}: {report.message} (it cannot be rebuilt here: {error})")
    return found if isinstance(found, BaseException) else None
