"""The live page of real jobs in a real browser: slow, hanging and lost ranks, and access without the token."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from hora.events import Timeline
from hora.telemetry import PARTS
from hora.watch.address import find_pages
from hora.watch.model import Entry
from hora.watch.recording import Recorder, read_run
from hora.watch.replay import open_recording
from simulated_run import Simulation, Slowness

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
SCRIPT = Path(__file__).with_name("watched_job.py")
START_S = 90.0  # four ranks import torch on a busy machine
pytestmark = pytest.mark.xdist_group("watch")


class Job(NamedTuple):
    """A job with a page: its process, the page's full URL (printed to a private file), its folder."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path

    def order(self, what: str, rank: int) -> None:
        """Make this rank slow, or make it hang, from now on (`watched_job.py`)."""
        fresh = self.folder / "order"
        fresh.write_text(str(rank))
        fresh.rename(self.folder / what)

    @property
    def printed(self) -> str:
        return (self.folder / "stderr").read_text()


@contextmanager
def _job(folder: Path, *flags: str, **variables: object) -> Iterator[Job]:
    command = [sys.executable, "-m", "hora", "run", "--dashboard", *flags, sys.executable, str(SCRIPT)]
    with _started(command, folder, **variables) as job:
        yield job


@contextmanager
def _started(command: list[str], folder: Path, **variables: object) -> Iterator[Job]:
    printed = folder / "stderr"
    printed.touch(mode=0o600)
    given = {name: str(value) for name, value in variables.items()}
    env = {**os.environ, **given, "OMP_NUM_THREADS": "1", "ORDERS": str(folder)}
    with printed.open("wb") as errors, (folder / "stdout").open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=errors, start_new_session=True)
    try:
        found = _until(lambda: re.search(rb"see it live: (\S+#token=\S+)", printed.read_bytes()), 30.0)
        yield Job(process, found[1].decode(), folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> Iterator[Job]:
    """One job that most tests share: each orders the behaviour that it needs. The last test stops it."""
    with _job(tmp_path_factory.mktemp("four"), "-np", "4") as job:
        yield job


def _until(look, limit_s: float):
    until = time.monotonic() + limit_s
    while not (found := look()):
        assert time.monotonic() < until, f"not within {limit_s} s"
        time.sleep(0.1)
    return found


def _ask(url: str, path: str, *, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    token = {"Authorization": f"Bearer {parts.fragment.removeprefix('token=')}"}
    connection.request(method, path, body=body, headers=token | headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _run(url: str) -> dict:
    return json.loads(_ask(url, "/api/run")[1])


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    yield page
    assert page.problems == []
    context.close()


def _shows(tab, selector: str, text: str, limit_s: float) -> None:
    tab.locator(selector).filter(has_text=re.compile(text)).first.wait_for(timeout=limit_s * 1000)


def test_output_is_followed_and_shown_as_plain_text(tab, four_ranks):
    tab.goto(four_ranks.url)
    _shows(tab, "#log div", r"step 20 <img src=x onerror=.*<script>", START_S)
    _shows(tab, "#log div", r"step 60 ", 60)
    assert not tab.locator("#demo").is_visible()  # only the page of a demo can kill ranks
    assert tab.locator("#log img, #log script").count() == 0
    assert tab.title() == "watched_job.py · hora"
    assert "token" not in tab.url  # users share their screens
    assert tab.evaluate("$('log').scrollHeight - $('log').scrollTop - $('log').clientHeight") < 40
    tab.fill("#log-filter", "step 40 ")
    _shows(tab, "#log div", "step 40 ", 10)
    assert tab.locator("#log div").count() == 1
    tab.fill("#log-filter", "")
    tab.select_option("#log-rank", "0")
    _shows(tab, "#log div", r"^0\s*step 20 ", 10)


def test_a_wrong_token_origin_or_host_name_is_rejected(tab, four_ranks):
    url = four_ranks.url
    tab.goto(url[:-1] + ("A" if url[-1] != "A" else "B"))
    _shows(tab, "#since", "token is missing or wrong", 20)
    assert tab.locator("#title").inner_text() == ""
    host = urlsplit(url).netloc
    # A page of another origin in the same browser, with the right token.
    tab.goto("about:blank")
    reached = tab.evaluate(
        """async ([url, token]) => {
            try { await fetch(url, {headers: {Authorization: `Bearer ${token}`}}); return "reached"; }
            catch (error) { return "refused"; }
        }""",
        [f"http://{host}/api/run", url.partition("token=")[2]],
    )
    assert reached == "refused"
    assert _ask(url, "/api/stop", method="POST", body="{}", Origin="http://evil.example")[0] == 403
    assert _ask(url, "/api/run", Host="evil.example")[0] == 421
    assert four_ranks.process.poll() is None


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_page_reports_a_rank_that_is_a_fifth_slower_and_its_slow_line(tab, four_ranks, slow):
    url = four_ranks.url
    tab.goto(url)
    _until(lambda: _run(url)["head"]["state"] == "training", START_S)
    four_ranks.order("slow", slow)
    _shows(tab, "#alerts h2", rf"rank {slow} on \S+ is 1\.\d\d× slower than the median .* waiting for data", 60)
    _shows(tab, "#alerts .guilty", r"watched_job\.py:\d+\s+__getitem__", 60)
    _until(lambda: [(one["rank"], "line" in one) for one in _run(url)["head"]["stragglers"]] == [(slow, True)], 60)
    bundle = zipfile.ZipFile(io.BytesIO(_ask(url, "/api/bundle")[1]))
    (four_ranks.folder / "slow.hora").write_bytes(bundle.read("run.hora"))
    verdicts = [verdict for verdict in read_run(four_ranks.folder / "slow.hora").episodes if verdict.rank == slow]
    assert verdicts[-1].line is not None
    assert verdicts[-1].line.own[2] == "__getitem__"


def test_profile_a_rank_and_download_everything(tab, four_ranks):
    tab.goto(four_ranks.url)
    _shows(tab, "#words", "training", START_S)
    _choose(tab, "Profile a rank", rank=1, seconds=1)
    _shows(tab, "#profiles .group", r"rank 1.*of the time.*watched_job\.py:\d+\s+train", 60)
    tab.click("#actions")
    with tab.expect_download(timeout=60_000) as download:
        tab.click("#menu >> text=Download everything")
    bundle = zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes()))
    assert set(bundle.namelist()) == {"run.hora", "now.json", "output.txt", "verdict.json", "README"}
    (four_ranks.folder / "run.hora").write_bytes(bundle.read("run.hora"))
    recorded = read_run(four_ranks.folder / "run.hora")
    assert recorded.progress()[0] > 10
    assert 1 in recorded.profiles


def _choose(tab, item: str, *, rank: int | None = None, seconds: int | None = None) -> None:
    """Choose an item of the menu and confirm its dialog."""
    tab.click("#actions")
    tab.click(f"#menu >> text={item}")
    if rank is not None:
        tab.select_option("#ask-rank", str(rank))
    if seconds is not None:
        tab.fill("#ask-seconds", str(seconds))
    tab.click("#ask-yes")


def test_a_hang_shows_the_line_of_the_late_rank_and_the_page_stops_the_job(tab, four_ranks):
    tab.goto(four_ranks.url)
    _shows(tab, "#words", "training", START_S)
    four_ranks.order("hang", 1)
    _shows(tab, "#words", "waiting for rank 1", 60)
    _shows(tab, "#alerts h2", "rank 1 on .* keeps the others waiting", 60)
    _shows(tab, "#alerts .guilty", "hang_if_asked.*the guilty line", 60)
    _shows(tab, "#stacks-note", "3 ranks here, 1 rank there", 60)
    _shows(tab, "#pending .op", "allreduce", 60)
    _choose(tab, "Stop the job")
    _shows(tab, "#words", "stopped", 60)
    assert four_ranks.process.wait(60) == 143
    assert "a user stopped it on its page" in four_ranks.printed


def test_kill_and_remove_ranks_of_an_elastic_job_and_stop_it_after_a_commit(tab, tmp_path):
    with _job(tmp_path, "-np", "3", "--min-np", "1", "--max-np", "3", ELASTIC=1) as job:
        tab.goto(job.url)
        _goes_on(tab, job.url)
        os.kill(_pid_of_rank(job, 2), signal.SIGKILL)
        _shows(tab, "#events li.lost", "rank 2 on .* is lost", 60)
        _shows(tab, "#events li.world", "generation 1: 2 ranks", 60)
        _goes_on(tab, job.url)
        _choose(tab, "Remove a rank", rank=1)
        _shows(tab, "#events li.lost", "rank 1 on .* is lost: removed on the job's page", 60)
        _shows(tab, "#events li.world", "generation 2: 1 ranks?", 60)
        _goes_on(tab, job.url)
        _choose(tab, "Commit, then stop")
        _shows(tab, "#words", "stopped", 60)
        assert job.process.wait(60) == 143
        assert "after a commit" in job.printed
        assert list((job.folder / "commits").glob("*.json"))


def _goes_on(tab, url: str) -> None:
    """Check that the world trains further steps and the curve continues."""
    _until(lambda: _run(url)["head"]["state"] == "training", START_S)
    before = _run(url)["head"]["step"]
    _until(lambda: _run(url)["head"]["step"] > before + 10, START_S)
    _shows(tab, "#words", "training", 60)


def _pid_of_rank(job: Job, rank: int) -> int:
    wanted = {f"ORDERS={job.folder}".encode(), f"HOROVOD_RANK={rank}".encode()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_script = str(SCRIPT).encode() in (entry / "cmdline").read_bytes().split(b"\0")
                if is_script and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no process has rank {rank}")


def test_the_page_of_the_demo_kills_a_rank_and_the_training_continues(tab, tmp_path):
    command = [sys.executable, "-m", "hora", "demo", "faults", "-np", "2", "--no-browser"]
    with _started(command, tmp_path) as job:
        tab.goto(job.url)
        _shows(tab, "#words", "training", START_S)
        _shows(tab, "#n-rate", r"\d", 30)
        tab.click("text=Kill rank 0")
        _shows(tab, "#events li.lost", "rank 0 on localhost is lost: killed", 60)
        _shows(tab, "#demo-note", r"1 rank continues: [\d.]+ s from the last step before", 60)
        assert tab.locator("#demo-ranks button").is_disabled()  # the last rank cannot be killed


def test_the_page_shows_a_recorded_run(tab, tmp_path):
    """Covers all parts of the page, with a run that has a lost rank, a slow rank and a NaN gradient."""
    simulation = Simulation(slow=[Slowness(5, 1.31, begin=200.0)], lost_at=(100.0, 7), total_steps=9000)
    nan = json.dumps({"kind": "nan", "text": "the gradient of 3.bias on rank 2 has 1 NaN"}).encode()
    plan = json.dumps({"kind": "plan", "text": "plan: a step takes 900 ms sent as it is"}).encode()
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    news = (Entry(simulation.began + 600.0, "event", 2, nan), Entry(simulation.began + 600.0, "event", 0, plan))
    for entry in (*simulation.entries(600.0), *news):
        recorder.record(entry)
    recorder.close()
    server, page = open_recording(tmp_path / "run.hora")
    try:
        tab.goto(page.full_url)
        words = r"rank 5 on beta is 1\.3\d× slower than the median since \d\d:\d\d, \d+\s% of it waiting for data"
        _shows(tab, "#alerts h2", words, 20)
        _shows(tab, "#link", "a recorded run", 10)
        _shows(tab, "#n-step", r"of 9,000", 10)
        _shows(tab, "#n-left", r"\d+ min", 10)
        assert tab.locator("#n-size").inner_text() == "7"
        assert tab.locator("#n-worlds").is_visible()  # the chart of the world's size over time
        assert tab.locator("#bars .stack").count() == 7
        assert tab.locator("#bars .stack").first.locator("i").count() == len(PARTS)
        _shows(tab, "#legend", "waiting for data.*backward.*waiting for other ranks.*optimizer", 10)
        wire = (r"network.*↑ [\d.]+ MB/s · [\d.]+ MB a step", r"link.*\d+ % of 1\.\d+ GB/s")
        for kind in ("cpu", "memory", "gpu 0", "gpu 1", "shm", *wire):
            _shows(tab, "#hosts .host", rf"beta.*{kind}", 10)
        _shows(tab, "#events li.lost", "rank 7 on beta is lost", 10)
        _shows(tab, "#events li.world", "generation 1: 7 ranks", 10)
        _shows(tab, "#events li.plan", "plan: a step takes 900 ms", 10)
        _shows(tab, "#events li.nan", r"the gradient of 3\.bias on rank 2", 10)
        marks = tab.evaluate("new Set(charts.metric.marks().map((mark) => mark.color)).size")
        assert marks == 3  # one for the new world, one for checkpoints, one for the lost rank and the NaN
        widths = tab.evaluate("charts.step.plot.series.slice(1).map((one) => one.width)")
        assert len(widths) == 9  # one per rank that ever existed, and their median
        assert widths[-1] == max(widths)
        red, green, _, _ = tab.evaluate(HEAT, 5)
        assert red > 180 > 120 > green  # rank 5 is shown as late
        assert not tab.locator("#actions").is_visible()
    finally:
        server.close()


def test_a_finished_run_still_shows_its_straggler_with_part_and_line(tab, tmp_path):
    simulation = Simulation(num_ranks=2, slow=[Slowness(1, 1.4, part="between", begin=20.0)])
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    for entry in simulation.entries(60.0):
        recorder.record(entry)
    stack = [[80, [["/home/me/train.py", 31, "train", "time.sleep(0.05)", "user"]]]]
    profile = json.dumps({"num_samples": 100, "seconds": 2.0, "stacks": stack}).encode()
    recorder.record(Entry(simulation.began + 60.0, "profile", 1, profile))
    recorder.record(Entry(simulation.began + 61.0, "end", -1, json.dumps({"outcome": "done"}).encode()))
    recorder.close()
    server, page = open_recording(tmp_path / "run.hora")
    try:
        tab.goto(page.full_url)
        words = r"rank 1 on beta was 1\.4\d× slower than rank 0 from .* to .*, \d+\s% of it between backward and step"
        _shows(tab, "#alerts h2", words, 20)
        _shows(tab, "#alerts .guilty", r"train\.py:31\s+train\s+time\.sleep", 10)
        assert tab.locator("#step-legend span").all_inner_texts() == ["rank 0", "rank 1, late"]
        untitled = tab.locator(".numbers > div:not([title]), h2:not([title])").all_inner_texts()
        assert [text for text in untitled if "×" not in text and "Timeline" not in text] == []
    finally:
        server.close()


def test_steps_longer_than_a_bin_leave_no_gaps_in_the_curves(tab, tmp_path):
    simulation = Simulation(num_ranks=2, work_s=3.0)
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    for entry in simulation.entries(60.0):
        recorder.record(entry)
    recorder.close()
    server, page = open_recording(tmp_path / "run.hora")
    try:
        assert None in _run(page.full_url)["columns"]["step"][0][5:]
        tab.goto(page.full_url)
        tab.locator("#c-step canvas").wait_for(timeout=20_000)
        curve = tab.evaluate("charts.step.data[1]")
        assert len(curve) > 50
        assert None not in curve[:-5]  # except for the unfinished step
    finally:
        server.close()


# Returns the colour of a rank at the end of the heat strip.
HEAT = """(rank) => {
    const strip = document.getElementById("heat"), rows = 8;
    const y = Math.floor(((rank + 0.4) / rows) * strip.height);
    return [...strip.getContext("2d").getImageData(strip.width - 4, y, 1, 1).data];
}"""


def test_the_page_shows_a_timeline(tab, tmp_path):
    timeline = Timeline(str(tmp_path / "timeline.json"))
    timeline.arrived(["allreduce.<b>weight</b>"], "ALLREDUCE", 0)
    timeline.arrived(["allreduce.<b>weight</b>"], "ALLREDUCE", 1)
    with timeline.running(["allreduce.<b>weight</b>"], [], [{}]):
        pass
    timeline.close()
    server, page = open_recording(tmp_path / "timeline.json")
    try:
        tab.goto(page.full_url)
        _shows(tab, "#t-late", "rank 1 came last in 100 % of 1 operations", 20)
        assert tab.locator("#t-canvas").is_visible()
        assert not tab.locator("#c-step").is_visible()
    finally:
        server.close()


def test_a_running_function_has_a_live_page(tmp_path, capfd):
    """Covers `horovod.run(…, dashboard=True)`."""
    import horovod

    go = tmp_path / "go"

    def wait(path):
        import hora
        import horovod.torch as hvd
        from waiting import wait_until

        hvd.init()
        hora.report(loss=0.5)
        wait_until("the test has looked", lambda: os.path.exists(path))
        return hvd.rank()

    def look():
        try:
            page = _until(lambda: next((one for one in find_pages() if one.pid == os.getpid()), None), 60.0)
            _until(lambda: "loss" in _run(page.full_url)["columns"]["metrics"], START_S)
            return _run(page.full_url)
        finally:
            go.touch()

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        assert horovod.run(wait, args=(str(go),), num_proc=2, dashboard=True) == [0, 1]
        seen = looked.result(60)
    assert [rank["state"] for rank in seen["head"]["ranks"]] == ["here", "here"]
    assert "hora: see it live: http://127.0.0.1:" in capfd.readouterr().err


NOT_A_NUMBER = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
loss = model(torch.ones(1, 4)).sum()
(loss * float("nan") if hvd.rank() == 1 else loss).backward()
optimizer.step()
"""


def test_a_failed_job_leaves_a_recording_and_prints_no_token_to_a_pipe(tmp_path):
    """stderr is a pipe here, whose reader is unknown.

    The recording contains the NaN that ended the job, with its parameter.
    """
    record = str(tmp_path / "run.hora")
    command = [sys.executable, "-m", "hora", "run", "-np", "2", "--record", record, sys.executable, "-c", NOT_A_NUMBER]
    env = {**os.environ, "HORA_DASHBOARD": "1", "HORA_NAN_CHECK": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert "see it live: http://127.0.0.1:" in done.stderr
    assert "token=" not in done.stderr + done.stdout
    seen = read_run(record)
    assert [(event.rank, event.text.partition(" has ")[0]) for event in seen.events if event.kind == "nan"] == [
        (1, "the gradient of bias on rank 1")
    ]
    assert seen.outcome == "failed"


def test_a_stall_report_shows_the_stack_of_the_late_rank_without_a_page(tmp_path):
    (tmp_path / "hang").write_text("1")
    env = {**os.environ, "ORDERS": str(tmp_path), "HOROVOD_STALL_CHECK_TIME_SECONDS": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, str(SCRIPT)]
    with (tmp_path / "stderr").open("wb") as errors:
        job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
    try:
        _until(lambda: b"# the guilty line" in (tmp_path / "stderr").read_bytes(), START_S + 30)
        assert b"rank 1 on localhost keeps the others waiting; it is here:" in (tmp_path / "stderr").read_bytes()
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(30)


PROCESS_GROUP = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("hora")
experts = dist.new_group([0, 1], group_desc="experts")
dist.all_reduce(torch.ones(3))
while dist.get_rank() == 1 and not os.path.exists(os.environ["ORDERS"] + "/go"):
    time.sleep(0.1)  # the guilty line
dist.all_gather_into_tensor(torch.ones(4), torch.ones(2), group=experts)
dist.destroy_process_group()
"""


def test_collectives_of_a_process_group_are_shown_with_the_groups_name(tmp_path):
    program, trace = tmp_path / "train.py", tmp_path / "trace.json"
    program.write_text(PROCESS_GROUP)
    flags = ["-np", "2", "--timeline-filename", str(trace)]
    command = [sys.executable, "-m", "hora", "run", "--dashboard", *flags, sys.executable, str(program)]
    with _started(command, tmp_path, HOROVOD_STALL_CHECK_TIME_SECONDS=3) as job:
        pending = _until(lambda: _run(job.url)["head"]["pending"], START_S)
        waiting = "experts/all_gather_into_tensor.0"  # the group's first operation
        assert [(one["name"], one["there"], one["missing"]) for one in pending] == [(waiting, [0], [1])]
        top = [sys.executable, "-m", "hora", "top", "--once", job.url]
        picture = subprocess.run(top, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True, timeout=60)
        assert f"{waiting}: 1 ranks have waited" in picture.stdout, picture
        _until(lambda: "# the guilty line" in job.printed, START_S)
        (tmp_path / "go").touch()
        assert job.process.wait(START_S) == 0
    names = trace.read_text()
    assert "default_pg/all_reduce" in names
    assert "experts/all_gather_into_tensor" in names
