"""`hora view`: a recorded run or a timeline in the page of a live one, without its controls."""

from __future__ import annotations

import os
from pathlib import Path

from hora.watch import address
from hora.watch.access import Access, new_token
from hora.watch.address import Page
from hora.watch.model import Run
from hora.watch.recording import read_run
from hora.watch.server import Server
from hora.watch.timeline import is_timeline, read_timeline

__all__ = ["open_recording"]


def open_recording(path: str | Path, *, listen: str = "") -> tuple[Server, Page]:
    """Serve a recording, or a timeline. ValueError when the file is neither."""
    timeline = read_timeline(path) if is_timeline(path) else None
    run = read_run(path) if timeline is None else Run({"title": Path(path).name, "began": timeline["began"]})
    host, port = address.parse_address(listen)
    sock = address.bind(host, port)
    url, hosts = address.urls_of(host, sock.getsockname()[1])
    access = Access(new_token(), hosts)
    server = Server(run, access, timeline=timeline, live=False)
    server.start([sock])
    title = str(run.facts.get("title", "") or Path(path).name)
    plain = "".join(letter if letter.isprintable() else "?" for letter in title[:200])  # it is shown in a terminal
    return server, Page(url, access.token, plain, os.getpid())
