"""The page's server: access control, floods of connections, and slow readers."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import socket
import sys
import time

import pytest

from hora.net import acceptor
from hora.watch import address, server
from hora.watch.address import choose_page, open_page, page_from_url, parse_address
from hora.watch.http import Access
from hora.watch.model import Entry, Run
from hora.watch.server import PageServer
from hora.watch.terminal import snapshots
from simulated_run import Simulation
from waiting import wait_until


class _Wishes:
    """A dashboard that only records the page's wishes."""

    def __init__(self):
        self.wishes = []

    def stacks(self):
        self.wishes.append("stacks")

    def profile(self, rank, seconds):
        self.wishes.append(("profile", rank, seconds))

    def stop(self, *, commit):
        self.wishes.append(("stop", commit))

    def remove(self, rank):
        self.wishes.append(("remove", rank))

    def record(self, entry): ...

    def look(self, run): ...

    def bundle(self):
        return b"PK"


@pytest.fixture
def served():
    simulation = Simulation(num_ranks=2, began=time.time())
    run = Run(simulation.facts)
    for entry in simulation.entries(10.0):
        run.apply(entry)
    sock, access, page = open_page("127.0.0.1:0", "t")
    wishes = _Wishes()
    one = PageServer(run, access, dashboard=wishes)
    one.start([sock])
    yield one, page, wishes
    one.close()


def _ask(page, path, method="GET", *, token=None, body=None, **headers):
    connection = http.client.HTTPConnection(page.url.split("/")[2], timeout=10)
    given = page.token if token is None else token
    connection.request(method, path, body=body, headers={"Authorization": f"Bearer {given}", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_the_page_and_its_files_have_a_strict_policy(served):
    _, page, _ = served
    total = 0
    for path in ("/", "/page.js"):
        status, body, headers = _ask(page, path, token="")
        assert status == 200
        total += len(body)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert total < 150_000


def test_public_files_contain_nothing_of_the_job(served):
    one, page, _ = served
    status, body, _ = _ask(page, "/", token="")
    assert status == 200
    assert page.token.encode() not in body
    assert str(one.run.facts["command"]).encode() not in body


@pytest.mark.parametrize("path", ["/api/run", "/api/stream", "/metrics", "/api/bundle"])
@pytest.mark.parametrize("token", ["", "wrong", "x" * 43])
def test_without_the_token_no_data_is_served(served, path, token):
    _, page, _ = served
    assert _ask(page, path, token=token)[0] == 401


@pytest.mark.parametrize("path", ["/api/stop", "/api/remove", "/api/profile", "/api/stacks"])
def test_without_the_token_no_action_is_taken(served, path):
    _, page, wishes = served
    assert _ask(page, path, "POST", token="wrong", body='{"rank": 0, "seconds": 1}')[0] == 401
    assert wishes.wishes == []


def test_with_the_token_all_data_is_served(served):
    _, page, _ = served
    status, body, headers = _ask(page, "/api/run")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["head"]["size"] == 2
    assert b"hora_world_size" in _ask(page, "/metrics")[1]
    assert _ask(page, "/api/bundle")[1] == b"PK"


def test_actions_reach_the_job(served):
    _, page, wishes = served
    for path, body in (("stacks", None), ("profile", '{"rank": 1, "seconds": 999}'), ("stop", '{"commit": true}'),
                       ("stop", "{}"), ("remove", '{"rank": 1}')):  # fmt: skip
        assert _ask(page, f"/api/{path}", "POST", body=body)[0] == 200
    assert wishes.wishes == ["stacks", ("profile", 1, 60.0), ("stop", True), ("stop", False), ("remove", 1)]


@pytest.mark.parametrize("body", ["", "[]", '{"rank": "x"}', "{", "null"])
def test_an_invalid_action_is_rejected(served, body):
    _, page, wishes = served
    assert _ask(page, "/api/remove", "POST", body=body)[0] == 400
    assert _ask(page, "/api/dance", "POST", body="{}")[0] == 404
    assert wishes.wishes == []


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1", "", "127.0.0.1:1"])
def test_another_host_name_is_rejected(served, name):
    """DNS rebinding: the attacker's name resolves to this address."""
    _, page, _ = served
    for path in ("/", "/api/run"):
        assert _ask(page, path, Host=name)[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_another_origin_is_rejected_even_with_the_token(served, origin):
    _, page, wishes = served
    assert _ask(page, "/api/run", Origin=origin)[0] == 403
    assert _ask(page, "/api/stop", "POST", body="{}", Origin=origin)[0] == 403
    assert _ask(page, "/api/run", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert wishes.wishes == []


def test_the_pages_own_origin_is_accepted(served):
    _, page, _ = served
    own = {"Origin": page.url.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert _ask(page, "/api/run", **own)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / SPDY/3\r\n\r\n",
        b"GET http://x/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n bad: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
)
def test_invalid_requests_get_400_and_the_server_continues(served, data):
    _, page, _ = served
    host, port = page.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(data)
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
    assert _ask(page, "/api/run")[0] == 200


def test_files_outside_the_table_do_not_exist(served):
    _, page, _ = served
    for path in ("/../server.py", "/%2e%2e/server.py", "/page.css/", "/site/page.js", "/api", "/api/run/x"):
        assert _ask(page, path)[0] == 404


def test_a_viewer_receives_everything_and_then_changes(served):
    one, page, _ = served
    news = snapshots(page)
    assert next(news)["everything"]["head"]["size"] == 2
    one.feed(Entry(time.time(), "line", 1, b"ohello <b>world</b>"))
    for more in news:
        if more.get("lines"):
            break
    assert more["lines"][0][2:] == [1, "stdout", "hello <b>world</b>"]
    news.close()


def test_a_viewer_is_notified_of_the_end(served):
    one, page, _ = served
    news = snapshots(page)
    next(news)
    one.feed(Entry(time.time(), "end", -1, b'{"outcome": "done", "text": ""}'))
    one.close()
    last = [more for more in news if "head" in more][-1]
    assert last["head"]["state"] == "done"
    assert _refused(page)


def _refused(page):
    try:
        _ask(page, "/")
    except OSError:
        return True
    return False


def test_excess_viewers_are_rejected_and_the_others_are_served(served):
    _, page, _ = served
    host, port = page.url.split("/")[2].split(":")
    request = f"GET /api/stream HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()
    sockets, answers = [], []
    try:
        for _ in range(1000):
            sock = socket.create_connection((host, int(port)), timeout=20)
            sockets.append(sock)
            sock.sendall(request)
            answers.append(sock.recv(12))
            if answers[-1].endswith(b"503"):
                sock.close()
        assert answers.count(b"HTTP/1.1 200") == server.MAX_VIEWERS
        assert answers.count(b"HTTP/1.1 503") == 1000 - server.MAX_VIEWERS
        assert _ask(page, "/api/run")[0] == 200
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize(
    "said", ["", "GET /page.js HTTP/1.1\r\nHost: {host}\r\n\r\n", "POST /api/stop HTTP/1.1\r\nHost: {host}\r\n"]
)
def test_a_crowd_of_unauthenticated_connections_does_not_keep_the_owner_out(served, said):
    """Open three times the limit: silent connections, ones that do not read, ones with unfinished requests."""
    _, page, _ = served
    host, port = page.url.split("/")[2].split(":")
    crowd, before = [], len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(3 * acceptor.MAX_STRANGERS):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect((host, int(port)))
            sock.sendall(said.format(host=f"{host}:{port}").encode())
            crowd.append(sock)
        assert _ask(page, "/api/run")[0] == 200
        stream = snapshots(page)
        assert "everything" in next(stream)
        stream.close()
        # Both ends are in this process: the crowd's sockets, and those that the server has kept.
        limit = before + 4 * acceptor.MAX_STRANGERS + 10
        wait_until("the server has let go of most of the crowd", lambda: len(os.listdir("/proc/self/fd")) <= limit)
    finally:
        for sock in crowd:
            sock.close()


def test_connections_that_are_open_at_the_end_write_nothing(monkeypatch, caplog):
    """Neither a traceback nor a destroyed task, which Python would write to the job's output."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: unraisable.append(str(what.exc_value)))
    sock, access, page = open_page("127.0.0.1:0", "t")
    server = PageServer(Run({}), access)
    server.start([sock])
    host, port = page.url.split("/")[2].split(":")
    with contextlib.ExitStack() as crowd:
        for number in range(acceptor.MAX_STRANGERS + 20):
            client = crowd.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 3 == 0:
                client.sendall(b"GET / HT")
        server.close()
        del server
        gc.collect()
    assert unraisable == []
    assert [record for record in caplog.records if record.name != "hora.net"] == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET //[x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //[x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        b"POST /api/stop HTTP/1.1\r\nHost: {host}\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /api/stop HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1." + b"\xc2\xb2" + b"\r\n\r\n",
        b"\r\n\r\n",
        b" / \r\n\r\n",
    ],
)
def test_unauthenticated_requests_write_nothing_into_the_jobs_log(served, data, caplog):
    _, page, _ = served
    host, port = page.url.split("/")[2].split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data.replace(b"{host}", f"{host}:{port}".encode()))
            assert sock.recv(13)[9:] in (b"400 ", b"401 ", b"421 ")
    assert _ask(page, "/api/run")[0] == 200
    assert caplog.records == []


@pytest.mark.parametrize(
    "body",
    ['{"rank": ' + "[" * 20000 + "]" * 20000 + "}", '{"rank": Infinity}', '{"rank": NaN}', '{"rank": 1e999}',
     '{"rank": ' + "9" * 5000 + "}", '{"rank": 1, "seconds": NaN}', '{"rank": 1, "seconds": 1' + "0" * 400 + "}"],
)  # fmt: skip
def test_hostile_json_is_rejected_with_an_explanation(served, body, caplog):
    _, page, wishes = served
    status, text, _ = _ask(page, "/api/profile", "POST", body=body)
    assert (status, text[:21]) == (400, b"this cannot be done: ")
    assert wishes.wishes == []
    assert caplog.records == []


def test_a_viewer_that_does_not_read_is_dropped(served, monkeypatch):
    one, page, _ = served
    monkeypatch.setattr(server, "_MAX_BACKLOG", 2)
    monkeypatch.setattr(server, "_TICK_S", 0.01)
    monkeypatch.setattr("hora.watch.http._WRITE_LIMIT_S", 0.5)
    host, port = page.url.split("/")[2].split(":")
    request = f"GET /api/stream HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(request)
        until = time.monotonic() + 30
        dropped = False
        while not dropped and time.monotonic() < until:
            for _ in range(300):
                one.feed(Entry(time.time(), "line", 0, b"o" + b"x" * 1900))
            time.sleep(0.05)
            dropped = time.monotonic() > until - 25 and not one._viewers
        assert dropped
    assert _ask(page, "/api/run")[0] == 200


def test_a_recorded_run_cannot_be_stopped():
    run = Run({"id": "x", "began": 0.0})
    sock, access, page = open_page("", "")
    one = PageServer(run, access)
    one.start([sock])
    try:
        assert json.loads(_ask(page, "/api/run")[1])["may"] == []
        assert _ask(page, "/api/stop", "POST", body="{}")[0] == 409
        assert _ask(page, "/api/bundle")[0] == 404
    finally:
        one.close()


def test_a_token_has_more_than_128_bits():
    tokens = set()
    for _ in range(100):
        sock, access, page = open_page("", "")
        sock.close()
        assert page.token == access.token
        assert len(page.token) * 6 >= 128
        tokens.add(page.token)
    assert len(tokens) == 100


def test_a_notebook_may_show_the_page_in_a_frame():
    assert "frame-ancestors http: https:" in Access("t", frozenset(), framed=True).headers()["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("", ("127.0.0.1", 0)), ("8000", ("127.0.0.1", 8000)),
     (":8000", ("127.0.0.1", 8000)), ("0.0.0.0:1", ("0.0.0.0", 1)),
     ("beta", ("beta", 0)), ("[::1]:80", ("::1", 80))],
)  # fmt: skip
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["a:b", "a:70000"])
def test_an_invalid_address(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/", "ftp://x/#token=a", "#token=a"])
def test_an_address_without_its_token_is_rejected(url):
    with pytest.raises(ValueError, match="whole"):
        page_from_url(url)


def test_only_private_streams_get_the_token(tmp_path):
    with open(tmp_path / "log", "w") as file:
        (tmp_path / "log").chmod(0o644)
        assert not address.is_private(file)
        (tmp_path / "log").chmod(0o600)
        assert address.is_private(file)
    assert not address.is_private(None)


def test_this_users_programs_find_the_page(served, monkeypatch):
    _, page, _ = served
    held = address.publish_page(page)
    assert page in address.find_pages()
    assert choose_page(None).url.startswith("http://")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user
    assert address.find_pages() == []
    monkeypatch.undo()
    held.close()
    assert page not in address.find_pages()
