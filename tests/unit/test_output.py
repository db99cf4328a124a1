"""Output of the workers: prefixes, line ends, encodings, files, limits."""

from __future__ import annotations

import io
import re
import stat
from pathlib import Path

import pytest

from hora.launch.controller.output import MAX_LINE_BYTES, LogFile, OutputWriter, Tail
from hora.launch.job import OutputOptions


def collect(chunks: list[tuple[int, str, bytes]], **options) -> bytes:
    sink = io.BytesIO()
    output = OutputWriter(OutputOptions(stdout=sink, stderr=sink, **options), {0: 0, 1: 1})
    for worker, stream, data in chunks:
        output.feed(worker, stream, data)
    for worker in (0, 1):
        output.end(worker)
    output.close()
    return sink.getvalue()


def test_every_line_gets_its_rank_and_stream():
    got = collect([(0, "stdout", b"a\nb\n"), (1, "stderr", b"c\n")])
    assert got == b"[0]<stdout>:a\n[0]<stdout>:b\n[1]<stderr>:c\n"


def test_lines_of_different_ranks_are_not_mixed():
    got = collect([(0, "stdout", b"half "), (1, "stdout", b"other\n"), (0, "stdout", b"line\n")])
    assert got == b"[1]<stdout>:other\n[0]<stdout>:half line\n"


def test_a_last_line_without_newline_is_shown_and_terminated():
    assert collect([(0, "stdout", b"end"), (1, "stdout", b"too")]) == b"[0]<stdout>:end\n[1]<stdout>:too\n"


@pytest.mark.parametrize("cut", range(1, 8))
def test_carriage_returns_end_lines_too(cut: int):
    data = b"1%\r2%\r\nx\n"
    got = collect([(0, "stdout", data[:cut]), (0, "stdout", data[cut:])])
    assert got == b"[0]<stdout>:1%\r[0]<stdout>:2%\r\n[0]<stdout>:x\n"


def test_a_progress_bar_is_shown_before_its_line_ends():
    sink = io.BytesIO()
    output = OutputWriter(OutputOptions(stdout=sink), {0: 0})
    output.feed(0, "stdout", b"10%\r")
    assert sink.getvalue() == b"[0]<stdout>:10%\r"


def bar(num_updates: int) -> bytes:
    """Return output as tqdm writes it: a carriage return before each update of the bar, a newline at the end."""
    return b"".join(b"\rTrain %d%%" % percent for percent in range(num_updates)) + b"\n"


def test_a_carriage_return_before_any_text_gets_no_prefix():
    got = collect([(0, "stderr", bar(3))])
    assert got == b"\r[0]<stderr>:Train 0%\r[0]<stderr>:Train 1%\r[0]<stderr>:Train 2%\n"


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_file_keeps_the_last_state_of_an_overwritten_line(tmp_path: Path, size: int):
    data = b"before\n" + bar(50) + b"after\r\n" + b"cut 1%\rcut 2%\r"
    chunks = [(0, "stderr", data[i : i + size]) for i in range(0, len(data), size)]
    wanted = b"[0]<stderr>:before\n[0]<stderr>:Train 49%\n[0]<stderr>:after\n[0]<stderr>:cut 2%\n"
    collect(chunks, directory=str(tmp_path))
    assert (tmp_path / "rank.0/stderr").read_bytes() == wanted
    with (tmp_path / "log").open("wb") as log:  # horovodrun … 2> log
        output = OutputWriter(OutputOptions(stderr=log), {0: 0})
        for worker, stream, piece in chunks:
            output.feed(worker, stream, piece)
        output.end(0)
    assert (tmp_path / "log").read_bytes() == wanted


@pytest.mark.parametrize("cut", range(1, 9))
def test_utf8_split_between_chunks_survives_on_text_streams(cut: int):
    data, sink = "grüße €\n".encode(), io.StringIO()
    output = OutputWriter(OutputOptions(stdout=sink), {0: 0})
    output.feed(0, "stdout", data[:cut])
    output.feed(0, "stdout", data[cut:])
    assert sink.getvalue() == "[0]<stdout>:grüße €\n"


def test_invalid_utf8_is_passed_unchanged_or_replaced():
    assert collect([(0, "stdout", b"\xff\xfe\n")]) == b"[0]<stdout>:\xff\xfe\n"
    sink = io.StringIO()
    OutputWriter(OutputOptions(stdout=sink), {0: 0}).feed(0, "stdout", b"\xff!\n")
    assert sink.getvalue() == "[0]<stdout>:\N{REPLACEMENT CHARACTER}!\n"


def test_timestamps_precede_the_rank():
    got = collect([(1, "stdout", b"x\n")], timestamp=True).decode()
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[1\]<stdout>:x\n", got)


def test_without_prefix_the_workers_bytes_are_unchanged():
    assert collect([(0, "stdout", b"a\nb")], prefix=False) == b"a\nb\n"


def test_a_very_long_line_is_written_in_pieces_with_one_prefix():
    long = b"x" * (3 * MAX_LINE_BYTES)
    chunks = [(0, "stdout", long[i : i + 65536]) for i in range(0, len(long), 65536)]
    assert collect([*chunks, (0, "stdout", b"\n")]) == b"[0]<stdout>:" + long + b"\n"


def test_a_line_in_pieces_is_closed_before_another_ranks_output():
    long = b"x" * MAX_LINE_BYTES
    got = collect([(0, "stdout", long), (1, "stdout", b"me\n"), (0, "stdout", b"y\n")])
    assert got == b"[0]<stdout>:" + long + b"\n[1]<stdout>:me\n[0]<stdout>:y\n"


def test_files_hold_the_same_lines(tmp_path: Path):
    got = collect([(0, "stdout", b"a\n"), (1, "stderr", b"b")], directory=str(tmp_path / "logs"))
    assert (tmp_path / "logs/rank.0/stdout").read_bytes() == b"[0]<stdout>:a\n"
    assert (tmp_path / "logs/rank.1/stderr").read_bytes() == b"[1]<stderr>:b\n"
    assert (tmp_path / "logs/rank.0/stderr").read_bytes() == b""
    assert got == b"[0]<stdout>:a\n[1]<stderr>:b\n"


@pytest.mark.parametrize(("num_proc", "name"), [(1, "rank.0"), (10, "rank.9"), (11, "rank.05"), (101, "rank.005")])
def test_directory_names_are_padded_to_the_digits_of_the_last_rank(tmp_path: Path, num_proc: int, name: str):
    OutputWriter(OutputOptions(directory=str(tmp_path)), {rank: rank for rank in range(num_proc)}).close()
    assert (tmp_path / name / "stdout").exists()


def test_old_files_are_truncated(tmp_path: Path):
    for text in (b"a long first run\n", b"b\n"):
        collect([(0, "stdout", text)], directory=str(tmp_path))
    assert (tmp_path / "rank.0/stdout").read_bytes() == b"[0]<stdout>:b\n"


def test_a_full_disk_loses_the_log_but_not_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0/stdout").symlink_to("/dev/full")
    got = collect([(0, "stdout", b"a\n"), (0, "stdout", b"b\n")], directory=str(tmp_path))
    assert got == b"[0]<stdout>:a\n[0]<stdout>:b\n"
    assert [r.getMessage() for r in caplog.records] == [
        f"cannot write {tmp_path}/rank.0/stdout: No space left on device. The rest of this output is not kept."
    ]


def test_without_a_console_files_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", None)
    output = OutputWriter(OutputOptions(directory=str(tmp_path)), {0: 0})
    output.feed(0, "stdout", b"a\n")
    output.close()
    assert (tmp_path / "rank.0/stdout").read_bytes() == b"[0]<stdout>:a\n"


def test_a_closed_console_does_not_stop_the_job(caplog: pytest.LogCaptureFixture):
    sink = io.BytesIO()
    output = OutputWriter(OutputOptions(stdout=sink), {0: 0})
    sink.close()
    output.feed(0, "stdout", b"a\n")
    output.feed(0, "stdout", b"b\n")
    assert "b\n" in output.tail(0)
    assert len(caplog.records) == 1


def test_the_tail_is_the_end_of_both_streams_and_stays_small():
    output = OutputWriter(OutputOptions(console=False), {0: 0})
    for number in range(20000):
        output.feed(0, "stdout", b"line %d\n" % number)
    output.feed(0, "stderr", b"Traceback\n")
    tail = output.tail(0)
    assert tail.endswith("line 19999\nTraceback\n")
    assert len(tail) <= 16 * 1024
    assert tail.startswith("line ")


def test_a_tail_keeps_the_end_and_begins_with_a_whole_line():
    tail = Tail(10)
    tail.add(b"one\ntwo\n")
    assert (tail.text, bytes(tail)) == ("one\ntwo\n", b"one\ntwo\n")
    tail.add(b"x\n")
    assert tail.text == "one\ntwo\nx\n"  # full, but nothing is lost yet
    tail.add(b"y\n")
    assert (tail.text, bytes(tail)) == ("two\nx\ny\n", b"e\ntwo\nx\ny\n")
    tail.add(b"z" * 100)
    assert (tail.text, bytes(tail)) == ("z" * 10, b"z" * 10)  # it has no line start
    for _ in range(100):
        tail.add(b"abc\n")
    assert (tail.text, bytes(tail)) == ("abc\nabc\n", b"c\nabc\nabc\n")
    assert len(tail._kept) <= 20


def test_log_files_are_readable_by_their_owner_only(tmp_path):
    log = LogFile(tmp_path / "folder" / "0" / "stdout")
    log.write(b"loss 0.1")
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert log.path.read_bytes() == b"loss 0.1"
