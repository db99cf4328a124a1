"""`hora view`: a recorded run in the same page as a live one, with nothing to stop and nobody to ask."""

from __future__ import annotations

import os
from pathlib import Path

from hora.watch import address
from hora.watch.access import Access, new_token
from hora.watch.address import Page
from hora.watch.recording import read_run
from hora.watch.server import Server

__all__ = ["open_recording"]


def open_recording(path: str | Path, *, listen: str = "") -> tuple[Server, Page]:
    """Serve a recording. ValueError when the file is none."""
    run = read_run(path)
    host, port = address.parse_address(listen)
    sock = address.bind(host, port)
    url, hosts = address.urls_of(host, sock.getsockname()[1])
    access = Access(new_token(), hosts)
    server = Server(run, access, bundle=None, live=False)
    server.start([sock])
    return server, Page(url, access.token, str(run.facts.get("title", "") or Path(path).name), os.getpid())
