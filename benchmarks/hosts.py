"""Compare collectives between hosts with gloo's, in the same run. The hosts are connected network namespaces.

    python -m benchmarks.hosts                              as fast as the machine can
    python -m benchmarks.hosts --rate 1gbit                 a cable of this speed (tc tbf), and how much of it is used
    python -m benchmarks.hosts --encrypt never              in clear
    python -m benchmarks.hosts --delay 20ms --loss 0.1%     a bad link (`bad_cable`)
    python -m benchmarks.hosts --rate 1gbit --cases fp16,bf16,int8 --sizes 16M,64M      with compression
    python -m benchmarks.hosts --rate 1gbit --train         whole training steps against DDP (`hosts_training`)
    python -m benchmarks.hosts --hosts 4 --ranks 1          four hosts, each with one rank

By default two hosts with two ranks each; as root. The ranks run `collectives`, which documents the measurement. "Of the
wire" is the time that the bytes alone need at the link's speed, divided by ours: every host sends and receives all of
them once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import offices
from benchmarks.collectives import SIZES, line

SIZES_OF_A_BAD_CABLE = "4K,64K,1M"
ETHERNET = 1514 / 1448  # bytes of a full frame, and of its payload


def run_ranks(hosts: Sequence[offices.Host], arguments: argparse.Namespace) -> list[dict]:
    worker = [sys.executable, "-m"]
    if arguments.train:
        worker += ["benchmarks.hosts_training", "--models", arguments.models, "--steps", str(arguments.steps)]
    else:
        worker += ["benchmarks.collectives", "--worker", "--sizes", arguments.sizes, "--cases", arguments.cases]
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.json"
        worker += ["--rounds", str(arguments.rounds), "--json", str(numbers)]
        offices.run_ranks(
            hosts,
            worker,
            num_local=arguments.ranks,
            limit_s=arguments.limit,
            environment={"HORA_ENCRYPT": arguments.encrypt},
        )
        found: list[dict] = json.loads(numbers.read_text())
    return found


def bits_a_second(rate: str) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number, unit = next((rate[: -len(unit)], unit) for unit in units if rate.endswith(unit))
    return float(number) * units[unit]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        default="",
        help=f"bytes, with K or M (default: {SIZES}; on a cable that loses packets {SIZES_OF_A_BAD_CABLE}, since "
        "one of "
        "64M would take minutes)",
    )
    parser.add_argument("--cases", default="sum", help="see benchmarks.collectives (default: sum)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender (default: 5)")
    parser.add_argument("--hosts", type=int, default=2, help="how many there are (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="on each host (default: 2)")
    offices.add_link_options(parser)
    parser.add_argument("--encrypt", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("--train", action="store_true", help="training steps instead of collectives")
    parser.add_argument("--models", default="MLP 4x2048,ResNet18", help="what is trained (default: both)")
    parser.add_argument(
        "--steps", type=int, default=200, help="of a training, until its loss is compared (default: 200)"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for everything (default: 900)")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    return parser


def measured(arguments: argparse.Namespace) -> list[dict]:
    """Create the hosts, run the ranks and return their results."""
    arguments.sizes = arguments.sizes or (SIZES if arguments.loss == "0%" else SIZES_OF_A_BAD_CABLE)
    link = {"rate": arguments.rate, "delay": arguments.delay, "loss": arguments.loss}
    with offices.offices(arguments.hosts, **link) as hosts:
        results = run_ranks(hosts, arguments)
    delay_s = offices.delay_s(arguments.delay)
    if arguments.rate and not arguments.train:
        for result in results:
            wire_us = result["bytes"] * ETHERNET * 8 / bits_a_second(arguments.rate) * 1e6
            result["of_the_wire"] = wire_us / result["hvd_us"]
            print(f"{line(result)}  of the wire {result['of_the_wire']:.2f} (gloo {wire_us / result['gloo_us']:.2f})")
    if delay_s and not arguments.train:
        for result in results:
            result["round_trips"] = result["hvd_us"] / 2e6 / delay_s
            print(f"{line(result)}  {result['round_trips']:.1f} round trips of the cable")
    return results


def main() -> None:
    arguments = parser().parse_args()
    results = measured(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
