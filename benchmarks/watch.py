"""Measure the cost and the reliability of the live page: `python -m benchmarks.watch overhead | slow | hang`.

overhead    a training step unobserved, observed, and with a page open, in turns; bytes per rank and second
slow        a random one of four ranks is a fifth slower: how often the page names it alone, and how soon
hang        a random one of four ranks hangs: how often the page shows its line, and how soon
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hora.watch.address import Page

OBEDIENT = Path(__file__).parents[1] / "tests" / "integration" / "watched_job.py"


def rank(model: str, num_steps: int) -> None:
    """Run one rank of a measured job; rank 0 prints the median step in milliseconds."""
    import torch

    import horovod.torch as hvd
    from benchmarks.models import WORKLOADS
    from benchmarks.training import make_step, timed

    hvd.init()
    torch.set_num_threads(1)
    step = make_step("overlap", WORKLOADS[model], "sgd", hvd.rank())
    times = [timed(step, 1) for _ in range(num_steps)]
    if hvd.rank() == 0:
        print(f"MEDIAN_MS {statistics.median(times[num_steps // 3 :]):.5f}", flush=True)
    hvd.shutdown()


def _hora(*flags: str, np: int) -> list[str]:
    return [sys.executable, "-m", "hora", "run", "-np", str(np), *flags, sys.executable, "-m", "benchmarks.watch"]


def _page(printed: Path, limit_s: float = 60.0) -> str:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found = re.search(r"see it live: (\S+#token=\S+)", printed.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise TimeoutError(printed.read_text())


def _one_run(model: str, steps: int, np: int, way: str) -> tuple[float, float]:
    """Return the milliseconds of a step and the bytes that a rank sent per second."""
    from hora.watch.address import page_from_url
    from hora.watch.terminal import snapshots

    with tempfile.TemporaryDirectory() as folder:
        printed, record = Path(folder, "stderr"), Path(folder, "run.hora")
        printed.touch(mode=0o600)
        flags = [] if way == "unobserved" else ["--dashboard", "--record", str(record)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with printed.open("w") as errors:
            job = subprocess.Popen(
                [*_hora(*flags, np=np), "rank", model, str(steps)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        if way == "page open":

            def look() -> None:
                for _ in snapshots(page_from_url(_page(printed))):
                    pass

            threading.Thread(target=look, daemon=True).start()
        output, _ = job.communicate(timeout=580)
        if job.returncode:
            raise RuntimeError(printed.read_text())
        sent = _bytes_per_second(record) if flags else 0.0
        found = re.search(r"MEDIAN_MS (\S+)", output)
        assert found is not None, output
        return float(found[1]), sent


def _bytes_per_second(record: Path) -> float:
    from hora.watch.recording import read_entries

    reports = [entry for entry in read_entries(record)[1] if entry.kind == "report"]
    busiest = max({entry.worker for entry in reports}, key=lambda w: sum(len(e.data) for e in reports if e.worker == w))
    mine = [entry for entry in reports if entry.worker == busiest]
    passed_s = mine[-1].at - mine[0].at
    frame_bytes = 90  # the message's header and its MAC
    return sum(len(entry.data) + frame_bytes for entry in mine[1:]) / passed_s if passed_s else 0.0


def overhead(np: int, rounds: int) -> dict:
    ways, result = ("unobserved", "observed", "page open"), {}
    for model, steps in (("tiny MLP", 6000), ("MLP 4x2048", 150)):
        times: dict[str, list[float]] = {way: [] for way in ways}
        sent = []
        for turn in range(rounds):
            for way in ways if turn % 2 == 0 else reversed(ways):
                ms, rate = _one_run(model, steps, np, way)
                times[way].append(ms)
                if rate:
                    sent.append(rate)
        ratios = {
            way: statistics.median(a / b for a, b in zip(times[way], times["unobserved"], strict=True)) for way in ways
        }
        result[model] = {
            "ms": {way: round(statistics.median(values), 4) for way, values in times.items()},
            "ratio": {way: round(value, 4) for way, value in ratios.items()},
            "bytes_per_s_a_rank": round(max(sent)),
        }
        print(model, json.dumps(result[model]), flush=True)
    result["meter_us_a_step"] = round(_meter_us(), 2)
    print("the meter's own work:", result["meter_us_a_step"], "us a step", flush=True)
    return result


def _meter_us() -> float:
    """Return the microseconds that the meter's calls add to a step of one bucket."""
    from hora.telemetry import Meter

    meter, clock = Meter(), time.perf_counter
    began = time.process_time()
    for _ in range(100_000):
        a = clock()
        meter.blocked = meter, a, ()
        meter.waited(a, 0.0)
        meter.blocked = None
        b = clock()
        meter.reduce_s += clock() - b
        meter.transport_s += 1e-6
        meter.num_bytes += 100
        c = clock()
        meter.backward_s += clock() - c
        meter.optimizer_s += clock() - c
        meter.step_done()
    return (time.process_time() - began) * 10


@contextlib.contextmanager
def _obedient_job(np: int) -> Iterator[tuple[Page, Path]]:
    """Run the training of the page's tests, controlled by files in a folder; yield its page and the folder."""
    from hora.watch.address import page_from_url

    with tempfile.TemporaryDirectory() as name:
        folder, printed = Path(name), Path(name, "stderr")
        printed.touch(mode=0o600)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ORDERS": name, "STEPS": "100000"}
        command = [sys.executable, "-m", "hora", "run", "-np", str(np), "--dashboard", sys.executable, str(OBEDIENT)]
        with printed.open("w") as errors:
            job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            yield page_from_url(_page(printed)), folder
        except BaseException:
            print(f"the job: {job.poll()}\n{printed.read_text()[-3000:]}", file=sys.stderr)
            raise
        finally:
            job.terminate()
            job.wait(60)


def _tries(what: str, np: int, tries: int, limit_s: float, found: Callable[[dict, int], bool | None]) -> dict:
    """Inject the fault into a random rank, repeatedly; `found(state, rank)` returns right, wrong, or None (not yet)."""
    chance, times, num_right = random.Random(0), [], 0
    with _obedient_job(np) as (page, folder):
        stream = _followed(page)
        for number in range(tries):
            next(now for now in stream if _is_calm(now) and now["head"]["step"] > 40)
            rank = chance.randrange(np)
            (folder / what).write_text(str(rank))
            began, answer = time.monotonic(), None
            while answer is None and time.monotonic() - began < limit_s:
                answer = found(next(stream), rank)
            took_s = time.monotonic() - began
            (folder / what).unlink()
            num_right += bool(answer)
            times += [took_s] if answer else []
            print(f"{what} {number}: rank {rank} {'right' if answer else 'WRONG'} after {took_s:.1f} s", flush=True)
    result = {
        "tries": tries,
        "right": num_right,
        "seconds_median": round(statistics.median(times), 1),
        "seconds_most": round(max(times), 1),
    }
    print(what, json.dumps(result), flush=True)
    return result


def _followed(page: Page) -> Iterator[dict]:
    """Yield the page's state as it grows; reconnect if the server drops this viewer as too slow."""
    from hora.watch.terminal import snapshots

    now: dict = {}
    while True:
        for news in snapshots(page):
            now |= news.get("everything", news)
            yield now


def _is_calm(now: dict) -> bool:
    head = now["head"]
    return head["state"] == "training" and not head["stragglers"] and not head["pending"]


def slow(np: int, tries: int) -> dict:
    def found(now: dict, rank: int) -> bool | None:
        named = [one["rank"] for one in now["head"]["stragglers"]]
        return named == [rank] if named else None

    return _tries("slow", np, tries, 30.0, found)


def hang(np: int, tries: int) -> dict:
    def found(now: dict, rank: int) -> bool | None:
        head = now["head"]
        if head["state"] != "waiting":
            return None
        if head["words"] != f"waiting for rank {rank}":
            return False
        stack = now["stacks"]["stacks"].get(str(rank))
        fresh = stack is not None and stack["at"] > head["now"] - 20 and stack["threads"]
        return True if fresh and any("the guilty line" in frame[3] for frame in stack["threads"][0][1]) else None

    return _tries("hang", np, tries, 30.0, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "slow", "hang", "rank"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=50)
    arguments = parser.parse_args()
    match arguments.what:
        case "rank":
            rank(arguments.rest[0], int(arguments.rest[1]))
        case "overhead":
            overhead(arguments.np, arguments.rounds)
        case "slow":
            slow(max(arguments.np, 4), arguments.tries)
        case "hang":
            hang(max(arguments.np, 4), arguments.tries)


if __name__ == "__main__":
    main()
