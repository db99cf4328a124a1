"""Tracebacks of exceptions that end a rank: which frames they show, and that equal ones are shown once."""

from __future__ import annotations

import os
import sys

import pytest

import hora
from hora import tracebacks
from hora.errors import HorovodInternalError

OURS = os.path.join(os.path.dirname(os.path.abspath(hora.__file__)), "engine", "somewhere.py")
USERS = "/home/me/train.py"


def code(source, filename):
    """Return the function `f` of a source that claims to be this file."""
    namespace = {"HorovodInternalError": HorovodInternalError}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def raised(error):
    """Return an exception that passed a line of the user and two of Hora."""
    inner = code("def check(error):\n    raise error", OURS)["check"]
    middle = code("def call(check, error):\n    check(error)", OURS)["call"]
    user = code("def step(call, check, error):\n    call(check, error)", USERS)["step"]
    with pytest.raises(BaseException) as caught:
        user(middle, inner, error)
    kept = caught.value.__traceback__.tb_next  # without this function's own frame
    return caught.value.with_traceback(kept)


def test_a_users_mistake_shows_the_users_lines_only():
    text = tracebacks.short_text(raised(ValueError("op must be a reduce op")))
    assert "train.py" in text
    assert "somewhere.py" not in text
    assert "(2 frames of Hora are hidden: HORA_FULL_TRACEBACK=1 shows them)" in text
    assert text.splitlines()[-1] == "ValueError: op must be a reduce op"


def test_a_defect_of_hora_shows_everything():
    text = tracebacks.short_text(raised(AttributeError("'NoneType' object has no attribute 'send'")))
    assert text.count("somewhere.py") == 2
    assert "hidden" not in text


def test_the_frames_of_a_cause_are_hidden_too():
    cause = raised(ValueError("the first"))
    error = raised(RuntimeError("the second"))
    error.__cause__ = cause
    text = tracebacks.short_text(error)
    assert "somewhere.py" not in text
    assert text.index("ValueError: the first") < text.index("RuntimeError: the second")
    assert "(4 frames" in text


def test_the_second_rank_with_the_same_traceback_writes_one_line():
    seen = set()

    def is_first(text):
        known = text in seen
        seen.add(text)
        return not known

    shown = [tracebacks.of_rank(raised(ValueError("bad batch")), full=False, is_first=is_first)[1] for _ in range(3)]
    assert shown[0].startswith("Traceback")
    assert shown[1:] == ["ValueError: bad batch (as on another rank)\n"] * 2


def test_full_tracebacks_are_written_by_every_rank():
    for _ in range(2):
        text, shown = tracebacks.of_rank(raised(ValueError("bad")), full=True, is_first=lambda text: False)
        assert text == shown
        assert text.count("somewhere.py") == 2


@pytest.fixture
def plain_hook(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append(error[0]))
    return told


def test_the_hook_writes_the_short_traceback_and_the_advice_for_a_lost_rank(plain_hook, capsys):
    for _ in range(2):  # a second `hvd.init()` replaces the hook, it does not wrap it
        tracebacks.install(full=False, is_first=lambda text: True, advice=lambda: "Use elastic.run.\n")
    error = raised(HorovodInternalError("rank 1 ended"))
    sys.excepthook(type(error), error, error.__traceback__)
    err = capsys.readouterr().err
    assert "somewhere.py" not in err
    assert err.endswith("HorovodInternalError: rank 1 ended\nUse elastic.run.\n")
    assert err.count("Use elastic.run.") == 1
    assert plain_hook == []


def test_a_keyboard_interrupt_is_left_to_the_program(plain_hook, capsys):
    tracebacks.install(full=False, is_first=lambda text: True, advice=lambda: "no")
    error = raised(KeyboardInterrupt())
    sys.excepthook(type(error), error, error.__traceback__)
    assert plain_hook == [KeyboardInterrupt]
    assert capsys.readouterr().err == ""
