"""What seeing a job run costs, and how sure it is. `python -m benchmarks.watch overhead | straggler | hour`

overhead    a training step unobserved, observed, and observed with a page open, in turns; bytes a rank sends in a second
straggler   a rank that is a fifth slower: how often it is named, and nobody else, and after how many seconds
hour        a simulated hour of eight ranks: the recording's size, and the seconds until it can be shown
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def rank(model_name: str, num_steps: int) -> None:
    """What every rank of the measured jobs runs; rank 0 prints the median step in milliseconds."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width, depth, batch = {"tiny": (64, 3, 16), "wide": (2048, 4, 32)}[model_name]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inputs, times = torch.randn(batch, width), []
    for step in range(num_steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        if step >= num_steps // 3:
            times.append(time.perf_counter() - began)
    if hvd.rank() == 0:
        print(f"MEDIAN_MS {1e3 * statistics.median(times):.5f}", flush=True)
    hvd.shutdown()


def slow_rank(slow: int) -> None:
    """A training of which every step takes 50 ms; one rank needs a fifth more for its data."""
    import torch

    import horovod.torch as hvd

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if hvd.rank() == slow:
                time.sleep(0.010)
            return torch.ones(64)

    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    for batch in torch.utils.data.DataLoader(Data(), batch_size=1):
        optimizer.zero_grad()
        time.sleep(0.05)
        model(batch).pow(2).mean().backward()
        optimizer.step()


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
    """(milliseconds of a step, bytes a rank sent per second)."""
    from hora.watch.client import page_from_url, snapshots

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
    for model, steps in (("tiny", 6000), ("wide", 150)):
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
    """What the meter adds to a step of one bucket, by itself: the calls that the engine and the optimizer make."""
    from hora.telemetry import Meter

    meter, clock = Meter(), time.perf_counter
    began = clock()
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
    return (clock() - began) * 10


def straggler(np: int, tries: int, at_once: int) -> dict:
    from hora.watch.client import page_from_url

    def one(number: int) -> tuple[bool, float]:
        slow = random.Random(number).randrange(np)
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder, "stderr")
            printed.touch(mode=0o600)
            with printed.open("w") as errors:
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                job = subprocess.Popen(
                    [*_hora("--dashboard", np=np), "slow", str(slow)], env=env, stdout=subprocess.DEVNULL, stderr=errors
                )
            try:
                return _named(page_from_url(_page(printed)), slow)
            finally:
                job.send_signal(signal.SIGINT)
                job.wait(60)

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(one, range(tries)))
    times = sorted(seconds for right, seconds in found if right)
    result = {
        "tries": tries,
        "right": sum(right for right, _ in found),
        "seconds_median": round(statistics.median(times), 1),
        "seconds_most": round(times[-1], 1),
    }
    print("straggler", json.dumps(result), flush=True)
    return result


def _named(page, slow: int) -> tuple[bool, float]:
    """Whether the slow rank, and it alone, is named; and how long after the first steps that was."""
    from hora.watch.client import snapshots

    began = None
    for news in snapshots(page):
        head = news.get("everything", news).get("head")
        if head is None:
            continue
        if began is None and head["step"] > 0:
            began = time.monotonic()
        if head["stragglers"]:
            assert began is not None
            return [one["rank"] for one in head["stragglers"]] == [slow], time.monotonic() - began
        if began is not None and time.monotonic() - began > 30:
            return False, 30.0
    return False, 0.0


def hour() -> dict:
    from hora.watch import view
    from hora.watch.recording import Recorder, read_run
    from hora.watch.simulation import Simulation, Slowness

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.hora")
        simulation = Simulation(slow=[Slowness(5, 1.31, begin=1800.0)])
        recorder = Recorder(path, simulation.facts)
        for entry in simulation.entries(3600.0):
            recorder.take(entry)
        recorder.close()
        began = time.perf_counter()
        json.dumps(view.everything(read_run(path)))
        result = {"megabytes": round(path.stat().st_size / 1e6, 2), "seconds": round(time.perf_counter() - began, 2)}
    print("hour", json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "straggler", "hour", "rank", "slow"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1)
    arguments = parser.parse_args()
    match arguments.what:
        case "rank":
            rank(arguments.rest[0], int(arguments.rest[1]))
        case "slow":
            slow_rank(int(arguments.rest[0]))
        case "overhead":
            overhead(arguments.np, arguments.rounds)
        case "straggler":
            straggler(max(arguments.np, 4), arguments.tries, arguments.at_once)
        case "hour":
            hour()


if __name__ == "__main__":
    main()
