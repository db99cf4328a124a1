"""Simulate offices on one machine: network namespaces joined by a slow, long or lossy link; as root.

    python -m benchmarks.offices --rate 50mbit --delay 20ms -- python train.py              two offices, a rank in each
    python -m benchmarks.offices --rate 100mbit --delay 10ms --loss 0.1% --ranks 2 -- python train.py
    python -m benchmarks.offices --rate 1gbit --offices 4 -- python -m benchmarks.hosts_training …

Every rank runs the command with its rank in the environment, so that `hvd.init()` finds the others. An office is a
host, and the link is its only connection. `--delay` is one way. All ranks share this machine's cores; without options
the link is as fast as the machine.

The kernel limits the rate (tc tbf). A process between the offices delays and drops packets
(testbeds/bad_cable.py), because many kernels have no netem. It needs about a core for 300 Mbit/s with losses,
or for a few Gbit/s without.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "testbeds"))

from namespaces import Host, badly_joined, joined


def add_link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="", help="the link's speed, such as 1gbit (default: not limited)")
    parser.add_argument("--delay", default="0ms", help="of the link, each way, such as 20ms")
    parser.add_argument("--loss", default="0%", help="of the link, such as 0.1%%")


def address_of(office: int) -> str:
    return f"10.79.0.{office + 1}"


def delay_s(delay: str) -> float:
    return float(delay.removesuffix("ms")) / 1000


@contextlib.contextmanager
def offices(count: int, *, rate: str = "", delay: str = "0ms", loss: str = "0%") -> Iterator[list[Host]]:
    """Create the offices and their link; remove them at the end."""
    addresses, lost = [address_of(office) for office in range(count)], float(loss.removesuffix("%")) / 100
    if (delay_s(delay) or lost) and count != 2:
        raise SystemExit("a link with a delay or losses joins two offices; leave --delay and --loss out for more")
    bad = delay_s(delay) or lost
    with badly_joined(addresses, delay_s=delay_s(delay), loss=lost) if bad else joined(addresses) as hosts:
        for host in hosts:
            if bad and not lost:  # larger, so fewer packets for the process; with losses their number matters
                host.run("ip", "link", "set", "cable", "mtu", "9000")
            if rate:
                how = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                host.run("tc", "qdisc", "add", "dev", "cable", "root", *how)
        yield hosts


def run_ranks(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    num_local: int,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run the command as this many ranks in each office; raise SystemExit if a rank fails or the limit passes."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        ranks = []
        for rank in range(num_local * len(hosts)):
            office, local_rank = divmod(rank, num_local)
            place = {
                "RANK": rank,
                "WORLD_SIZE": num_local * len(hosts),
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": num_local * len(hosts),
                "HOROVOD_LOCAL_RANK": local_rank,
                "HOROVOD_LOCAL_SIZE": num_local,
                "HOROVOD_CROSS_RANK": office,
                "HOROVOD_CROSS_SIZE": len(hosts),
                "HOROVOD_HOSTNAME": f"host{office}",
                "MASTER_ADDR": address_of(0),
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": "cable",
                "HORA_SECRET_FILE": secret,
                "OMP_NUM_THREADS": 1,
            }
            env = {**os.environ, **{name: str(value) for name, value in place.items()}, **(environment or {})}
            ranks.append(subprocess.Popen(hosts[office].command(*command), env=env))
        try:
            statuses = [rank.wait(limit_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the ranks did not end within {limit_s:g} s") from None
        finally:
            for started in ranks:
                started.kill()
    if any(statuses):
        raise SystemExit(f"the ranks ended with {statuses}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_link_options(parser)
    parser.add_argument("--offices", type=int, default=2, help="how many there are (default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="in each office (default: 1)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for everything (default: 3600)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command of every rank")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("say what the ranks are to run, after --")
    with offices(arguments.offices, rate=arguments.rate, delay=arguments.delay, loss=arguments.loss) as hosts:
        run_ranks(hosts, command, num_local=arguments.ranks, limit_s=arguments.limit)


if __name__ == "__main__":
    main()
