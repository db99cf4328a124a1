"""The live page of a job: observes the job, keeps the run, serves the page, and forwards the page's actions.

`Watching` (`launch.job`) creates a `Dashboard` on the user's request. If a job stalls, it requests the
ranks' stacks; if a rank is slow, it requests a profile. So the answer is ready when someone looks.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hora.config import in_notebook
from hora.files import new_file
from hora.watch import address, view
from hora.watch.http import Access
from hora.watch.kubeflow import Reports
from hora.watch.model import MAX_LINE_CHARS, Entry, Run
from hora.watch.progress import ProgressLine
from hora.watch.recording import Recorder
from hora.watch.server import PageServer
from hora.watch.tracking import Tracking
from hora.watch.verdict import make_verdict

_PROFILE_S = 2.0
_ASK_AGAIN_S = 30.0
_MAX_LINES_PER_S = 400
_MAX_PARTIAL = 64 * 1024

_log = logging.getLogger("hora.watch")


class JobControl(Protocol):
    """Operations of the page on the job. Thread-safe."""

    def query(self, question: Mapping[str, Any], worker: int | None = None) -> None:
        """Send a question to one worker, or to all."""

    def stop(self, why: str) -> None:
        """End the job."""

    def remove(self, worker: int, why: str) -> None:
        """End one worker's process."""


class Dashboard:
    """The observer of a job (`launch.job.Observation`), whose methods the page calls. Thread-safe.

    `listen`: host:port. `record`: a file for `hora view`. `page=False`: no page. `verdict`: at the end. `reports`: to
    Kubeflow. `tracking`: the job's MLflow run. `progress`: a line that changes, where the job was started.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        job: JobControl,
        *,
        listen: str = "",
        record: str | None = None,
        page: bool = True,
        verdict: bool = True,
        reports: Reports | None = None,
        tracking: Tracking | None = None,
        progress: bool = False,
    ) -> None:
        self._job = job
        self._reports = reports
        self._tracking = tracking
        self._recorder = Recorder(record, facts)
        self._verdict_folder = Path(record or "verdict.json").parent if verdict else None
        self._output = _Output()
        self._run = Run(facts)
        self._asked_stacks_at = 0.0
        self._asked_about = ""
        self._stop_at_commit = False
        self._profiled: dict[int, float] = {}
        self.page: address.Page | None = None
        sockets, access, notebook = [], Access("", frozenset()), page and in_notebook()
        if page:
            sock, access, self.page = address.open_page(listen, str(facts.get("title", "")), framed=notebook)
            sockets.append(sock)
        self._server = PageServer(self._run, access, dashboard=self)
        if self.page is not None:
            self._published = address.publish_page(self.page)
            _announce(self.page, address.parse_address(listen)[0], notebook)
        url = "" if self.page is None else self.page.full_url
        self.progress = ProgressLine(str(facts.get("title", "")), url) if progress else None
        self._server.start(sockets)

    # ---- the job ------------------------------------------------------------------------------------------

    def note(self, kind: str, worker: int, /, **news: Any) -> None:
        """Take what `Run` takes under this kind."""
        self._server.feed(Entry(time.time(), kind, worker, json.dumps(news).encode()))

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """Take a worker's telemetry or its response to a question."""
        if kind == "committed" and self._stop_at_commit:
            self._job.stop("after a commit, as requested on its page")
        elif kind in ("report", "stack", "profile"):
            self._server.feed(Entry(time.time(), kind, worker, data))

    def output(self, worker: int, stream: str, data: bytes) -> None:
        now = time.time()
        for line in self._output.lines(worker, stream, data, now):
            self._server.feed(Entry(now, "line", worker, line))

    def ended(self, outcome: str, text: str) -> None:
        """Handle the end of the job (done, failed or stopped): inform the viewers and close everything."""
        self.note("end", -1, outcome=outcome, text=text)
        self._server.close()
        if self.progress is not None:
            self.progress.show(self._run)
        if self.page is not None:
            self._published.close()
        if self._reports is not None:
            self._reports.close(self._run)
        self._recorder.close()
        if self._verdict_folder is not None:
            _conclude(self._run, self._verdict_folder)
        if self._tracking is not None:
            verdict = make_verdict(self._run)
            self._tracking.end(outcome, verdict.text(), verdict.to_json())

    # ---- the page's requests, in the server's thread --------------------------------------------------------

    def stacks(self) -> None:
        self._asked_stacks_at = time.time()
        self._job.query({"question": "stack"})

    def profile(self, rank: int, seconds: float) -> None:
        self._job.query({"question": "profile", "seconds": seconds}, self._worker(rank))

    def _worker(self, rank: int) -> int:
        if rank not in self._run.places:
            raise ValueError(f"there is no rank {rank}")
        return self._run.places[rank].worker

    def stop(self, *, commit: bool) -> None:
        if commit:
            self._job.query({"question": "commit"})
            self._stop_at_commit = True
            self.note("event", -1, kind="note", text="stops after the next commit")
        else:
            self._job.stop("a user stopped it on its page")

    def remove(self, rank: int) -> None:
        worker = self._worker(rank)
        if not self._run.facts.get("elastic"):
            raise ValueError("only an elastic job continues without one of its ranks; stop the job instead")
        self._job.remove(worker, "killed" if self._run.facts.get("demo") else "removed on the job's page")

    def record(self, entry: Entry) -> None:
        self._recorder.record(entry)

    def look(self, run: Run) -> None:
        """Request what a person would request; runs once a second."""
        if self._reports is not None:
            self._reports.tick(run)
        if self.progress is not None and run.outcome is None:
            self.progress.show(run)
        stuck = run.stuck() if run.outcome is None else None
        name = stuck.name if stuck is not None else ""
        if name and (time.time() - self._asked_stacks_at > _ASK_AGAIN_S or self._asked_about != name):
            self.stacks()
        self._asked_about = name
        for straggler in run.stragglers[:2]:
            if run.now - self._profiled.get(straggler.rank, 0.0) > _ASK_AGAIN_S:
                self._profiled[straggler.rank] = run.now
                self.profile(straggler.rank, _PROFILE_S)
                # Profile an ordinary rank at the same time: the difference shows what makes the other one slow.
                slow = {one.rank for one in run.stragglers}
                ordinary = next((rank for rank in sorted(run.places) if rank not in slow), None)
                if ordinary is not None:
                    self.profile(ordinary, _PROFILE_S)

    def bundle(self) -> bytes:
        """Return everything about the run as a zip file."""
        run, data = self._run, io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr(zipfile.ZipInfo("run.hora"), self._recorder.contents())
            bundle.writestr("verdict.json", make_verdict(run).to_json())
            bundle.writestr("now.json", view.as_json(view.everything(run)))
            lines = (f"{line.at:.3f} [{line.rank}]<{line.stream}>: {line.text}\n" for line in run.lines)
            bundle.writestr("output.txt", "".join(lines))
            bundle.writestr("README", "Open run.hora with `hora view run.hora`.\n")
        return data.getvalue()


class _Output:
    """Splits the workers' output into lines, and drops lines beyond a readable rate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partial: dict[tuple[int, str], bytes] = {}
        self._second = (0, 0)  # the second, and its number of lines

    def lines(self, worker: int, stream: str, data: bytes, now: float) -> list[bytes]:
        with self._lock:
            *whole, rest = (self._partial.pop((worker, stream), b"") + data).replace(b"\r", b"\n").split(b"\n")
            if rest:
                self._partial[worker, stream] = rest[-_MAX_PARTIAL:]
            second, count = self._second
            count = count if second == int(now) else 0
            room = max(_MAX_LINES_PER_S - count, 0)
            kept = [line for line in whole if line.strip()]
            self._second = int(now), count + len(kept)
            letter = stream[3:4].encode()  # std(o)ut, std(e)rr
            lines = [letter + line[: 4 * MAX_LINE_CHARS] for line in kept[:room]]
            if room and len(kept) > room:
                lines.append(
                    letter + b"[... more than %d lines in a second: the rest is omitted here]" % _MAX_LINES_PER_S
                )
            return lines


def _conclude(run: Run, folder: Path) -> None:
    """Show the verdict, and write it to `verdict.json`."""
    verdict = make_verdict(run)
    path, text = folder / "verdict.json", verdict.text()
    try:
        with os.fdopen(new_file(path), "w", encoding="utf-8") as file:
            file.write(verdict.to_json())
        text += f"\n  {path.name}: these figures, for `hora compare`"
    except OSError as error:
        text += f"\n  {path} cannot be written: {error.strerror}"
    stream = sys.stdout if in_notebook() else sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a closed stream
        print(f"hora: {text}", file=stream, flush=True)


def _announce(page: address.Page, host: str, notebook: bool) -> None:
    if host not in ("127.0.0.1", "localhost", "::1"):
        _log.warning("the dashboard listens on %s without encryption: anyone on the network can read it", host)
    if notebook:
        from IPython.display import HTML, IFrame, display

        url = page.full_url
        display(HTML(f'<a href="{url}" target="_blank" rel="noopener">see the job live</a>'), IFrame(url, "100%", 720))
        return
    shown = page.full_url
    if not address.is_private(sys.stderr):  # other people may read this output
        shown = (
            f"{page.url} (`hora top --url` prints the address with its token, to you alone; "
            "`hora top` shows the job here)"
        )
    print(f"hora: see it live: {shown}", file=sys.stderr, flush=True)
