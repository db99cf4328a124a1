"""`hora top`: a job in a terminal. Draws the page's data with rich."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hora.logs import printable
from hora.telemetry import PARTS
from hora.watch.address import Page

_CONNECT_LIMIT_S = 10.0
_SILENCE_LIMIT_S = 40.0  # the page sends at least a heartbeat every 15 s
_COLORS = dict(zip(PARTS, ("yellow", "blue", "magenta", "green", "red", "cyan", "bright_black", "white"), strict=True))
_STATES = {"training": "green", "done": "blue", "failed": "red", "failing": "red", "stopped": "red"}
_WAIT = PARTS.index("wait")
_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR = 60
_MAX_RANKS = 24


def snapshots(page: Page) -> Iterator[dict[str, Any]]:
    """Yield the page's updates: the full state first, then changes. Ends with the job. Raises OSError, ValueError."""
    connection, answer = _request(page, "GET", "/api/stream")
    try:
        while line := answer.readline():
            if line.strip():
                yield json.loads(line)
    finally:
        connection.close()


def post(page: Page, path: str, arguments: dict[str, Any]) -> None:
    _request(page, "POST", path, json.dumps(arguments).encode())[0].close()


def _request(
    page: Page, method: str, path: str, body: bytes | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    netloc = urlsplit(page.url).netloc
    connection = http.client.HTTPConnection(netloc, timeout=_CONNECT_LIMIT_S)
    connection.request(method, path, body=body, headers={"Authorization": f"Bearer {page.token}"})
    if connection.sock is not None:
        connection.sock.settimeout(_SILENCE_LIMIT_S)
    answer = connection.getresponse()
    if answer.status != 200:
        text = answer.read(1000).decode(errors="replace").strip()
        connection.close()
        raise ValueError(f"{page.url} refuses: {text}")
    return connection, answer


def show(page: Page, *, once: bool = False, console: Console | None = None) -> None:
    """Draw the job until it ends or the user leaves. `once`: a single picture, for scripts."""
    console = console or Console()
    run: dict[str, Any] = {}
    if once:
        for news in snapshots(page):
            _apply(run, news)
            console.print(_picture(run, console.width))
            return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        drawn = 0.0
        for news in snapshots(page):
            _apply(run, news)
            if time.monotonic() - drawn > 0.4:
                live.update(_picture(run, console.width), refresh=True)
                drawn = time.monotonic()
    console.print(_picture(run, console.width))


def _apply(run: dict[str, Any], news: Mapping[str, Any]) -> None:
    """Apply the full state or a change; only the latest bins matter here."""
    news = _printable(news)
    everything = news.get("everything")
    if everything is not None:
        run.clear()
        run.update(everything)
        return
    for key in ("head", "columns", "stacks"):
        if key in news:
            run[key] = news[key]
    run["lines"] = [*run.get("lines", ()), *news.get("lines", ())][-200:]


def _picture(run: Mapping[str, Any], width: int) -> RenderableType:
    now = run["head"]
    parts: list[RenderableType] = [_headline(run, now), _numbers(now)]
    parts += [_drift(one) for one in now["drifts"][-2:]]
    parts += [_straggler(one) for one in now["stragglers"][:2]]
    parts += [_pending(op) for op in now["pending"][:2] if op["missing"]]
    parts += [_ranks(now, run["columns"], width), _legend(), _machines(now), _lines(run["lines"], width)]
    return Group(*parts)


def _headline(run: Mapping[str, Any], now: Mapping[str, Any]) -> Text:
    color = _STATES.get(now["state"], "yellow")
    facts = run["facts"]
    title, command = str(facts.get("title", "")), str(facts.get("command", ""))
    words = (now["words"], f"bold {color}")
    return Text.assemble(("● ", color), words, "   ", (title, "bold"), "  ", (command, "dim"))


def _numbers(now: Mapping[str, Any]) -> Text:
    total = f" of {now['total']:,}" if now["total"] else ""
    left = "" if now["left_s"] is None else f"   {_duration(now['left_s'])} left"
    rate = f"   {now['samples_per_s']:,.0f} samples/s" if now["samples_per_s"] else ""
    return Text(
        f"step {now['step']:,}{total}   {now['step_ms'] or 0:.4g} ms a step{rate}{left}   {now['size']} ranks   "
        f"{100 * (now['hidden'] or 0):.0f} % of the reduction hidden\n"
    )


def _drift(one: Mapping[str, Any]) -> Panel:
    return Panel(Text(one["text"], style="bold"), border_style="red", title="drift", title_align="left")


def _straggler(one: Mapping[str, Any]) -> Panel:
    since = time.strftime("%H:%M", time.localtime(one["since"]))
    text = f"{one['claim']} since {since}" + (f", {one['cause']}" if one["cause"] else "")
    if "line" in one:
        file, number, function, code = one["line"]["own"]
        text += f"\n{file}:{number} in {function}: {code}"
    text += f"\ntry first: {one['advice']}"
    return Panel(Text(text, style="bold"), border_style="yellow", title="straggler", title_align="left")


def _pending(op: Mapping[str, Any]) -> Panel:
    missing = ", ".join(map(str, op["missing"]))
    text = f"{op['name']}: {len(op['there'])} ranks have waited {_duration(op['waited_s'])} for rank {missing}"
    return Panel(Text(text, style="bold"), border_style="red", title="waiting", title_align="left")


def _ranks(now: Mapping[str, Any], columns: Mapping[str, Any], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "host", "state", "own ms", "where a step goes", "lateness"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("rank", "own ms") else "left")
    hosts = max((len(facts["host"]) for facts in now["ranks"]), default=0)
    room = max(width - 30 - min(hosts, 24), 20)  # for the bars, and half of it for the history
    late = {straggler["rank"] for straggler in now["stragglers"]}
    ranks = now["ranks"]
    if len(ranks) > _MAX_RANKS:
        ranks = sorted(ranks, key=lambda r: r.get("parts", [0] * len(PARTS))[_WAIT])[:_MAX_RANKS]
    longest = max((sum(r["parts"]) for r in ranks if "parts" in r), default=1.0) or 1.0
    rows = {rank: row for row, rank in enumerate(columns["ranks"])}
    for facts in ranks:
        style = "red" if facts["rank"] in late or facts["state"] in ("lost", "failed") else ""
        own = sum(facts["parts"]) - facts["parts"][_WAIT] if "parts" in facts else 0.0
        history = columns["late"][rows[facts["rank"]]][-(room // 3) :] if facts["rank"] in rows else []
        table.add_row(
            Text(str(facts["rank"]), style),
            Text(facts["host"][:24], style),
            Text(facts["state"], style),
            Text(f"{own:.4g}" if own else "–", style),
            _bar(facts.get("parts", ()), longest, min(room * 2 // 3 - 2, _BAR)),
            Text("".join(_block(value) for value in history), "red" if style else "yellow"),
        )
    return table


def _bar(parts: Sequence[float], longest: float, width: int) -> Text:
    bar = Text()
    for part, value in zip(PARTS, parts, strict=False):
        bar.append("█" * round(width * value / longest), _COLORS[part] if part != "wait" else "dim red")
    return bar


def _legend() -> Text:
    pieces = [piece for part in PARTS for piece in (("■ ", _COLORS[part]), (f"{part}  ", "dim"))]
    return Text.assemble("\n", *pieces, "\n")


def _block(late: float | None) -> str:
    return " " if late is None else _BLOCKS[min(int(late / 25 * 8), 8)]


def _machines(now: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("machine", "ranks", "cpu", "memory", "gpus"):
        table.add_column(name)
    for name, facts in list(now["hosts"].items())[:12]:
        gpus = "  ".join(f"{100 * gpu['busy']:.0f} %" for gpu in facts.get("gpus", ())[:8])
        memory = (
            f"{facts['memory'] / 1e9:.1f} of {facts.get('memory_total', 0) / 1e9:.0f} GB" if "memory" in facts else ""
        )
        cpu = f"{100 * facts['cpu']:.0f} % of {facts.get('num_cpus', '?')}" if "cpu" in facts else ""
        table.add_row(*map(Text, (name, str(len(facts["ranks"])), cpu, memory, gpus)))  # texts, not markup
    return table


def _lines(lines: Sequence[Sequence[Any]], width: int) -> Text:
    text = Text("\n")
    for _, _, rank, _, words in lines[-8:]:
        text.append(f"[{'hora' if rank < 0 else rank}] ", "cyan")
        text.append(words[: max(width - 8, 20)] + "\n", "dim")
    return text


def _printable(value: Any) -> Any:
    """Return the page's JSON without control characters in its texts."""
    if isinstance(value, dict):
        return {printable(key): _printable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
