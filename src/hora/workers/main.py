"""Entry point of a worker's process (`python -m hora.workers.main`): runs its code or script.

The code comes from the agent's memory (HORA_WORKER_ORDER_FILE), never from the command line. As in a notebook, a
line that begins with `!` is a shell command, in which `{name}` and `$name` stand for Python variables. A thread
enforces the worker's memory limit.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.launch.environment import variables
from hora.launch.processes import family
from hora.workers.backend import ORDER_VARIABLE

_SHELL_LINE = re.compile(r"^(?P<indent>[ \t]*)!(?P<command>.*)$")
_VARIABLE = re.compile(r"\{(?P<braced>[A-Za-z_]\w*)\}|\$(?P<plain>[A-Za-z_]\w*)")
_QUOTES = re.compile(r"""\\.|#|\'{3}|"{3}|'|\"""")
_WATCH_S = 0.5


def expand_shell_lines(code: str) -> str:
    """Replace lines that begin with `!` by calls. A backslash continues such a line."""
    lines: list[str] = []
    waiting: list[str] = []
    indent = quote = ""
    for line in code.splitlines():
        found = None if waiting or quote else _SHELL_LINE.match(line)
        if found is None and not waiting:
            quote = _open_quote(line, quote)
            lines.append(line)
            continue
        if found is not None:
            indent = found["indent"]
        waiting.append(found["command"] if found is not None else line)
        if not waiting[-1].endswith("\\"):
            lines.append(f"{indent}__hora_shell__({chr(10).join(waiting)!r}, globals() | locals())")
            lines.extend([""] * (len(waiting) - 1))  # line numbers in tracebacks stay right
            waiting = []
    return "\n".join(lines) + "\n"


def _open_quote(line: str, quote: str) -> str:
    """Return the triple quote that is open after this line, if any. `quote` was open before it."""
    inside = quote
    for found in _QUOTES.findall(line):
        if not inside and found.startswith("#"):
            break
        if not inside and found[0] in "'\"":
            inside = found
        elif inside == found:
            inside = ""
    return inside if len(inside) == 3 else ""


def _shell(command: str, names: Mapping[str, Any]) -> None:
    def fill(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return str(names[name]) if name in names else match[0]

    status = subprocess.call(_VARIABLE.sub(fill, command), shell=True)
    if status != 0:
        print(f"hora: the command `{command.strip()}` ended with status {status}", file=sys.stderr, flush=True)


def _watch_memory(limit_gib: float) -> None:
    """End the worker with an explanation when it and its children exceed their memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        used = sum(_resident_pages(pid) for pid in family(os.getpid())) * page / 2**30
        if used > limit_gib:
            print(
                f"hora: this worker uses {used:.2f} GiB of memory but was given {limit_gib:g}; it is ended. "
                "Launch it with more memory.",
                file=sys.stderr,
                flush=True,
            )
            os.killpg(os.getpgrp(), signal.SIGKILL)
        threading.Event().wait(_WATCH_S)


def _resident_pages(pid: int) -> int:
    try:
        _, _, shared, *_ = (fields := Path(f"/proc/{pid}/statm").read_text().split())
        return int(fields[1]) - int(shared)
    except (OSError, ValueError):  # it ended just now
        return 0


def main() -> None:
    """Run the requested script or code in a fresh `__main__`."""
    sys.excepthook = _show_error
    order = json.loads(Path(variables()[ORDER_VARIABLE]).read_text())
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    threading.Thread(target=_watch_memory, args=(order["memory_gib"],), name="hora-memory", daemon=True).start()
    sys.path.insert(0, os.getcwd())
    sys.argv = [order["script"] or "<worker>"]
    if not order["script"]:
        _run(expand_shell_lines(order["code"]), "<worker code>")
    elif order["source"] is not None:
        _run(order["source"], order["script"])
    else:
        sys.path[0] = str(Path(order["script"]).resolve().parent)
        runpy.run_path(order["script"], run_name="__main__")


def _run(source: str, name: str) -> None:
    # A real `__main__`: what the code defines can be pickled, and its children find it there.
    module = types.ModuleType("__main__")
    module.__dict__["__hora_shell__"] = _shell
    # Tracebacks show the lines of a text that is in no file.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec"), module.__dict__)


# What led to the worker's own first line: how this module was started (`module_command`), and this module.
_NOT_THE_USERS = ("<string>", "<frozen runpy>", runpy.__file__, __file__)


def _show_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print the traceback as the interpreter does, without the frames before the worker's first line."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_USERS:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    main()
