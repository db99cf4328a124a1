"""A Python program that runs in a process forked for it, instead of a new interpreter: `python SCRIPT …`, `-m MODULE`.

It finds what the interpreter would give it: arguments, path, `__main__`, the handling of its exit and its errors.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


@dataclass(frozen=True)
class Program:
    """The script, or the module, and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, argv: Sequence[str]) -> Program | None:
        """Return the program of a command line; None if that is not a Python with a script or a module."""
        rest = list(argv[1:])
        while rest[:1] == ["-u"]:  # ranks are unbuffered in any case
            del rest[0]
        if not argv or not _PYTHON.fullmatch(os.path.basename(argv[0])) or not rest:
            return None
        if rest[0] == "-m" and len(rest) > 1:
            return cls(rest[1], True, tuple(rest[2:]))
        return None if rest[0].startswith("-") else cls(rest[0], False, tuple(rest[1:]))

    def text(self) -> bytes:
        """Return its source, as far as it is found in the current directory."""
        place = Path(self.name.replace(".", "/"))
        places = [place.with_suffix(".py"), place / "__main__.py"] if self.is_module else [Path(self.name)]
        return next((path.read_bytes() for path in places if path.is_file()), b"")

    def run(self) -> int:
        """Run it as this process's main program; return the exit status."""
        sys.argv[:] = [self.name, *self.arguments]
        try:
            if self.is_module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.realpath(self.name)))
                _run_script(os.path.abspath(self.name))
        except SystemExit as error:
            return status_of(error)
        except BaseException as error:  # reported as the interpreter does, without the frames that lead to the program
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
                trace = trace.tb_next
            error.__traceback__ = trace or error.__traceback__
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        return 0


def status_of(error: SystemExit) -> int:
    """Return the exit status of `sys.exit`, which prints what is no number, as the interpreter does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _run_script(path: str) -> None:
    """Run a file as `__main__`, which it stays until the end of the process: its functions can be pickled."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    exec(code, vars(main))
