"""Collectives and training steps between hosts in one table: `python -m benchmarks.hosts_table`, as root, half an hour.

    python -m benchmarks.hosts_table --rows plain,wire --json hosts.json    some rows; the file keeps earlier runs
    python -m benchmarks.hosts_table --rounds 1 --steps 0                   a quick trial

Each row is a run of `benchmarks.hosts`. In brackets: the smallest and the largest round. `load` is the machine's load
average before the run, `stolen` the share of processor time that its hypervisor took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from benchmarks import hosts
from benchmarks.names import some_of

MIB = 2**20
MLP = "MLP 4x2048"
GIGABIT = ("--rate", "1gbit")
Found = dict[str, list[dict]]  # by run


def run(rounds: int, steps: int, *options: str) -> list[dict]:
    load, before = os.getloadavg()[0], psutil.cpu_times()
    results = hosts.measured(hosts.parser().parse_args([*options, "--rounds", str(rounds), "--steps", str(steps)]))
    after = psutil.cpu_times()
    stolen = (after.steal - before.steal) / (sum(after) - sum(before))
    return [result | {"load": load, "stolen": stolen} for result in results]


RUNS: dict[str, Sequence[str]] = {
    "plain": ("--encrypt", "never"),
    "encrypted": ("--encrypt", "always", "--sizes", "16M,64M"),
    "wire": (*GIGABIT, "--encrypt", "never", "--sizes", "1M,16M,64M"),
    "encrypted wire": (*GIGABIT, "--encrypt", "always", "--sizes", "1M,16M,64M"),
    "compressed": (*GIGABIT, "--encrypt", "never", "--cases", "fp16,bf16,int8", "--sizes", "16M,64M"),
    "training": (*GIGABIT, "--encrypt", "never", "--train"),
    "encrypted training": (*GIGABIT, "--encrypt", "always", "--train", "--models", MLP),
    "unshaped training": ("--encrypt", "never", "--train", "--models", MLP),
    "unshaped encrypted training": ("--encrypt", "always", "--train", "--models", MLP),
    "four hosts": ("--hosts", "4", "--ranks", "1", "--encrypt", "never"),
    "four hosts encrypted": ("--hosts", "4", "--ranks", "1", "--encrypt", "always"),
    "bad network": ("--delay", "20ms", "--loss", "0.1%", "--sizes", "4K,1M"),
}
NEEDS = {"encrypted": ("plain",)}


def by_size(results: Sequence[dict], what: str, case: str = "sum") -> dict[int, float]:
    return {result["bytes"]: result[what] for result in results if result["case"] == case}


def show(name: str, values: dict[int, float], spread: Sequence[dict[int, float]] = ()) -> None:
    for size, value in values.items():
        text = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        between = " ({:.2f} to {:.2f})".format(*(each[size] for each in spread)) if spread else ""
        print(f"{name:44s} {text:>8s} {value:6.2f}{between}", flush=True)


def show_against_gloo(found: Found, row: str, name: str) -> None:
    times, *spread = (by_size(found[row], what) for what in ("times", "times_least", "times_most"))
    show(f"{name}, gloo's time / ours, {'encrypted' if 'encrypted' in row else 'plain'}", times, spread)


def show_encrypted(found: Found) -> None:
    plain, encrypted = by_size(found["plain"], "hvd_us"), by_size(found["encrypted"], "hvd_us")
    ratios = {size: plain[size] / encrypted[size] for size in encrypted if size in plain}
    show("unshaped, encrypted / plain, throughput", ratios)


def show_wire(found: Found, row: str) -> None:
    encrypted = ", encrypted" if "encrypted" in row else ""
    show(f"1 Gbit/s{encrypted}, share of the wire's own time", by_size(found[row], "of_the_wire"))


def show_compressed(found: Found) -> None:
    for case in ("fp16", "bf16", "int8"):
        show(f"1 Gbit/s, {case}: times faster than fp32", by_size(found["compressed"], "times_float32", case))


def show_training(found: Found, row: str) -> None:
    """Print DDP, which never encrypts, beside ours."""
    where = f"{'unshaped' if row.startswith('unshaped') else '1 Gbit/s'}{', encrypted' if 'encrypted' in row else ''}"
    for result in found[row]:
        times, losses = result["ms"], result["losses"]
        for name in ("overlap", "bf16", "int8"):
            ratio = statistics.median([ddp / own for ddp, own in zip(times["DDP"], times[name], strict=True)])
            loss = ""
            if result["steps"] and name != "overlap":
                away = abs(losses[name] / losses["overlap"] - 1)
                loss = f"loss after {result['steps']} steps {100 * away:.2f} % from fp32's"
            what = f"{where}, {result['task']}, {name}: DDP's time / ours"
            print(f"{what:62s} {ratio:6.2f}  {loss}".rstrip(), flush=True)


def show_bad_network(found: Found) -> None:
    for result in found["bad network"]:
        print(
            f"20 ms of delay each way, 0.1 % loss: {result['bytes'] // 1024} KiB takes {result['hvd_us'] / 1000:.0f} "
            f"ms, {result['round_trips']:.1f} round trips (gloo {result['gloo_us'] / 1000:.0f} ms)",
            flush=True,
        )


SHOWS: dict[str, Callable[[Found], None]] = {
    "plain": partial(show_against_gloo, row="plain", name="unshaped"),
    "encrypted": show_encrypted,
    **{row: partial(show_wire, row=row) for row in RUNS if row.endswith("wire")},
    "compressed": show_compressed,
    **{row: partial(show_training, row=row) for row in RUNS if row.endswith("training")},
    **{row: partial(show_against_gloo, row=row, name="four hosts x 1 rank") for row in RUNS if "four" in row},
    "bad network": show_bad_network,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=some_of(tuple(RUNS)), default="all", help=f"of {','.join(RUNS)}, or all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender (default: 5)")
    parser.add_argument(
        "--steps", type=int, default=200, help="of a training, until its loss is compared (default: 200)"
    )
    parser.add_argument("--json", type=Path, help="keep the results here; what other rows have left there is shown too")
    arguments = parser.parse_args()
    kept = arguments.json is not None and arguments.json.exists()
    found: Found = json.loads(arguments.json.read_text()) if kept else {}
    for name in arguments.rows:
        found[name] = run(arguments.rounds, arguments.steps, *RUNS[name])
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print()
    for row in RUNS:
        if all(name in found for name in (*NEEDS.get(row, ()), row)):
            SHOWS[row](found)
            print(f"    load {found[row][0]['load']:.1f}, stolen {100 * found[row][0]['stolen']:.0f} %")


if __name__ == "__main__":
    main()
