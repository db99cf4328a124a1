"""Exit status of a command, and the words of its error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from hora.errors import JobFailedError


def exit_status_of(prog: str, command: Callable[[], int | None], *, failed: int | None = None) -> int:
    """Call a command and return its exit status, with errors on stderr. `failed`: the status of a failed job, if fixed.

    2: an invalid request; 1: it could not be met.
    """
    try:
        return command() or 0
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except JobFailedError as error:
        # Horovod's own command keeps Horovod's paragraph, which scripts may search.
        print(f"{prog}: {error if failed else error.headline or error}", file=sys.stderr)
        return failed or error.exit_code or 1
    except BrokenPipeError:  # the reader of our output (`| head`) is gone; discard the rest of the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (RuntimeError, OSError) as error:  # unreachable hosts, a start timeout, a full disk
        # A process or a thread could not be started.
        scarce = isinstance(error, BlockingIOError) or "start new thread" in str(error)
        advice = ": too few processes are allowed; see `ulimit -u`" if scarce else ""
        print(f"{prog}: {error}{advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # a job has already been ended
        return 130
