"""Stacks of this process's threads, requested by a person, or by the launcher when the job stalls.

A frame is [file, line, function, code, origin], the innermost first. Its origin is "user", "library" or "engine": only
the rank itself knows where its packages lie. Any thread may call; the training thread is not disturbed.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from functools import lru_cache
from types import FrameType
from typing import Any

_MAX_FRAMES = 50
_MAX_THREADS = 24
_MAX_STACKS = 20
_LOOKS_PER_S = 50.0

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENGINE = os.path.join(_PACKAGE, "engine", "")
_LABS = os.path.join(_PACKAGE, "labs", "")  # programs as a user would write them
_OURS = tuple(os.path.join(os.path.dirname(_PACKAGE), name, "") for name in ("hora", "horovod", "sparkdl"))

Place = tuple[str, int, str]


def _places(frame: FrameType | None) -> tuple[Place, ...]:
    places: list[Place] = []
    while frame is not None and len(places) < _MAX_FRAMES:
        code = frame.f_code
        # Instructions that the compiler adds have no line: a thread seen in one has None.
        places.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return tuple(places)


@lru_cache(maxsize=4096)
def _origin(file: str) -> str:
    if file.startswith(_ENGINE):
        return "engine"
    if file.startswith(_LABS):
        return "user"
    installed = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(os.__file__)}
    installed.update(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    libraries = (*_OURS, *(os.path.join(folder, "") for folder in installed), "<frozen")
    return "library" if file.startswith(libraries) else "user"


def _with_code(places: tuple[Place, ...]) -> list[list[Any]]:
    return [
        [file, line, name, linecache.getline(file, line).strip()[:200], _origin(file)] for file, line, name in places
    ]


def current_stacks() -> bytes:
    """Return all threads except the calling one, the training thread first, as JSON for `Run`'s stack entry."""
    mine, main = threading.get_ident(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != mine}
    order = sorted(frames, key=lambda ident: ident != main)
    threads = [[names.get(i, str(i)), _with_code(_places(frames[i]))] for i in order[:_MAX_THREADS]]
    return json.dumps({"threads": threads}).encode()


def current_line() -> str:
    """Return the line of the user's code that the training thread is in: "train.py:12 in main". Thread-safe."""
    places = _places(sys._current_frames().get(threading.main_thread().ident or 0))
    of_users = [place for place in places if _origin(place[0]) == "user"]
    if not places:
        return "unknown"
    file, line, name = (of_users or places)[0]
    return f"{file}:{line} in {name}"


def callers_line() -> str:
    """Return the line of the user's code that called Hora: "train.py:12", or "cell 5, line 3" of a notebook."""
    frame: FrameType | None = sys._getframe(1)
    # Python writes some functions itself, such as a dataclass's.
    while frame is not None and (frame.f_code.co_filename == "<string>" or _origin(frame.f_code.co_filename) != "user"):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return f"{os.path.basename(file)}:{line}" if cell is None else f"cell {cell}, line {line}"


def rank_condition() -> str:
    """Return the `if` around the training thread's line, or a caller's, that asks for the rank: '`if hvd.rank() == 0:`
    at train.py:3'. Empty if there is none. Thread-safe.
    """
    for file, line, _ in _places(sys._current_frames().get(threading.main_thread().ident or 0)):
        if _origin(file) == "user":
            for node in ast.walk(_parsed(file)):
                if isinstance(node, ast.If) and node.body[0].lineno <= line <= (node.end_lineno or 0):
                    condition = ast.unparse(node.test)
                    if "rank" in condition:
                        return f"`if {condition}:` at {file}:{node.lineno}"
    return ""


def _parsed(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # the file has changed since
        return ast.Module(body=[], type_ignores=[])


def profile(seconds: float) -> bytes:
    """Sample the training thread and count its stacks. Blocks for `seconds`."""
    main, counts = threading.main_thread().ident, Counter[tuple[Place, ...]]()
    until, looks = time.monotonic() + seconds, 0
    while looks == 0 or time.monotonic() < until:
        frame = sys._current_frames().get(main or 0)
        if frame is not None:
            counts[_places(frame)] += 1
            looks += 1
        del frame  # it would keep the thread's objects alive
        time.sleep(1 / _LOOKS_PER_S)
    stacks = [[count, _with_code(places)] for places, count in counts.most_common(_MAX_STACKS)]
    return json.dumps({"num_samples": looks, "seconds": seconds, "stacks": stacks}).encode()
