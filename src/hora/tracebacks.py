"""The traceback of an exception that ends a rank: the user's own frames, and written once if several ranks raise it.

`install` replaces `sys.excepthook` in a rank that runs a script; `of_rank` serves the worker that runs a function.
HORA_FULL_TRACEBACK=1 (`--full-traceback`) shows every frame on every rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from hora.errors import HorovodInternalError

_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Hora raises these for a call that the user can correct. With another type the defect may be Hora's own.
_FOR_USERS = (ValueError, TypeError, RuntimeError, OSError)
HIDDEN = "HORA_FULL_TRACEBACK=1 shows them"


def short_text(error: BaseException) -> str:
    """Return the traceback without Hora's frames, or with all if the exception looks like a defect of Hora."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__)
    if not isinstance(error, _FOR_USERS) and whole.stack and _is_ours(whole.stack[-1]):
        return "".join(whole.format())
    hidden = _hide(whole)
    # The chain of a lost rank's error explains Hora's connection, not the user's program.
    lines = list(whole.format(chain=not isinstance(error, HorovodInternalError)))
    if hidden > 1:  # the exception stays the last line
        lines.insert(-len(list(whole.format_exception_only())), f"  ({hidden} frames of Hora are hidden: {HIDDEN})\n")
    return "".join(lines)


def of_rank(error: BaseException, *, full: bool, is_first: Callable[[str], bool]) -> tuple[str, str]:
    """Return the traceback, and the lines to write on this rank.

    Args:
        error: what the user's program raised.
        full: keep Hora's frames, and write the traceback on every rank.
        is_first: returns whether no other rank has raised this traceback before.
    """
    text = "".join(traceback.format_exception(error)) if full else short_text(error)
    if full or is_first(text):
        return text, text
    last = traceback.format_exception_only(error)[-1].rstrip()
    return text, f"{last} (as on another rank)\n"


def install(*, full: bool, is_first: Callable[[str], bool], advice: Callable[[], str]) -> None:
    """Make `sys.excepthook` write the short traceback of an exception that ends the script.

    `advice`: what to add to the error that a lost rank caused. `full`: only that is added.
    """
    plain = getattr(sys.excepthook, "replaced", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        more = advice() if isinstance(error, HorovodInternalError) else ""
        if full or not isinstance(error, Exception):  # KeyboardInterrupt
            plain(kind, error, trace)
            text = ""
        else:
            text = of_rank(error.with_traceback(trace), full=False, is_first=is_first)[1]
        print(text + more, end="", file=sys.stderr, flush=True)  # one write: lines of several ranks would mix

    hook.replaced = plain  # type: ignore[attr-defined]
    sys.excepthook = hook


def _hide(shown: traceback.TracebackException | None) -> int:
    """Remove Hora's frames from an exception and from those that led to it; return their number."""
    hidden = 0
    while shown is not None:
        frames = [frame for frame in shown.stack if not _is_ours(frame)]
        if frames:
            hidden += len(shown.stack) - len(frames)
            shown.stack = traceback.StackSummary.from_list(frames)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return hidden


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN_FILES)
