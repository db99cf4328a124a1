"""Collectives between hosts against gloo, in the same run. The hosts are network namespaces joined by a cable.

    python -m benchmarks.hosts                              as fast as the machine can
    python -m benchmarks.hosts --rate 1gbit                 a cable of this speed (tc tbf), and how much of it is used
    python -m benchmarks.hosts --encrypt never              in clear
    python -m benchmarks.hosts --delay 20ms --loss 0.1%     a bad one (`bad_cable`)
    python -m benchmarks.hosts --rate 1gbit --cases fp16,bf16,int8 --sizes 16M,64M      with compression
    python -m benchmarks.hosts --rate 1gbit --train         whole training steps against DDP (`hosts_training`)
    python -m benchmarks.hosts --hosts 4 --ranks 1          four hosts, each with one rank

Two hosts with two ranks each, unless said otherwise; as root. What is measured, and how, is said in `collectives`, which runs
on the ranks. "Of the wire" is the time that the bytes alone would need at the cable's speed, divided by ours: every host
sends and receives all of them once.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.collectives import SIZES, line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from namespaces import Host, badly_joined, joined

SIZES_OF_A_BAD_CABLE = "4K,64K,1M"
ETHERNET = 1514 / 1448  # bytes of a full frame, and how many of them are ours


def address_of(host: int) -> str:
    return f"10.79.0.{host + 1}"


def shape(host: Host, arguments: argparse.Namespace) -> None:
    """Make this host's end of the cable as slow as asked."""
    if arguments.rate:
        how = ["tbf", "rate", arguments.rate, "burst", "256kb", "latency", "50ms"]
        host.run("tc", "qdisc", "add", "dev", "cable", "root", *how)


def run_ranks(hosts: list[Host], arguments: argparse.Namespace, folder: Path) -> list[dict]:
    secret, numbers, num_local = folder / "secret", folder / "numbers.json", arguments.ranks
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    worker = [sys.executable, "-m"]
    if arguments.train:
        worker += ["benchmarks.hosts_training", "--models", arguments.models, "--steps", str(arguments.steps)]
    else:
        worker += ["benchmarks.collectives", "--worker", "--sizes", arguments.sizes, "--cases", arguments.cases]
    worker += ["--rounds", str(arguments.rounds), "--json", str(numbers)]
    ranks = []
    for rank in range(num_local * len(hosts)):
        number, local_rank = divmod(rank, num_local)
        place = {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": num_local * len(hosts),
            "HOROVOD_LOCAL_RANK": local_rank,
            "HOROVOD_LOCAL_SIZE": num_local,
            "HOROVOD_CROSS_RANK": number,
            "HOROVOD_CROSS_SIZE": len(hosts),
            "HOROVOD_HOSTNAME": f"host{number}",
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "cable",
            "HORA_SECRET_FILE": secret,
            "HORA_ENCRYPT": arguments.encrypt,
            "OMP_NUM_THREADS": 1,
        }
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        ranks.append(subprocess.Popen(hosts[number].command(*worker), env=env))
    try:
        statuses = [rank.wait(arguments.limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(statuses):
        raise SystemExit(f"the ranks ended with {statuses}")
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
        help=f"bytes, with K or M (default: {SIZES}; on a cable that loses packets {SIZES_OF_A_BAD_CABLE}, since one of "
        "64M would take minutes)",
    )
    parser.add_argument("--cases", default="sum", help="see benchmarks.collectives (default: sum)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender (default: 5)")
    parser.add_argument("--hosts", type=int, default=2, help="how many there are (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="on each host (default: 2)")
    parser.add_argument("--rate", default="", help="the cable's speed, such as 1gbit (default: not limited)")
    parser.add_argument("--delay", default="0ms", help="of the cable, each way, such as 20ms")
    parser.add_argument("--loss", default="0%", help="of the cable, such as 0.1%%")
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
    """What the ranks have measured on hosts that were made for it."""
    delay_s, loss = float(arguments.delay.removesuffix("ms")) / 1000, float(arguments.loss.removesuffix("%")) / 100
    arguments.sizes = arguments.sizes or (SIZES_OF_A_BAD_CABLE if loss else SIZES)
    addresses = [address_of(host) for host in range(arguments.hosts)]
    cable = badly_joined(addresses, delay_s=delay_s, loss=loss) if delay_s or loss else joined(addresses)
    with tempfile.TemporaryDirectory() as folder, cable as hosts:
        for host in hosts:
            shape(host, arguments)
        results = run_ranks(hosts, arguments, Path(folder))
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
