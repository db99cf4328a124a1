"""Hosts and slots: parsing them from text and placing ranks. Pure: no network, no clock.

`place_ranks` makes all placements: for jobs of fixed size (`get_host_assignments`), generations of elastic jobs, and
Spark tasks. Not here: whether a host is this machine (`net.sockets`), how to reach it
(`providers.ssh`), which hosts a job may use (`controller.policy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hora.world import RendezvousEndpoint, World

# A leading dash would make a name look like an option to ssh.
_HOST = re.compile(r"(?!-)([\w.-]+):([0-9]+)")
_HOSTFILE_LINE = re.compile(r"(?!-)([\w.-]+)(?::([0-9]+)|\s+slots\s*=\s*([0-9]+)(?:\s+max[_-]slots\s*=\s*[0-9]+)?)?")


@dataclass(frozen=True)
class HostInfo:
    """A host and how many processes may run on it."""

    hostname: str
    slots: int

    @classmethod
    def from_string(cls, text: str) -> HostInfo:
        """Parse `name:slots`."""
        match = _HOST.fullmatch(text.strip())
        if not match:
            raise ValueError(
                f"Invalid host input: {text.strip()!r}. Write each host as name:slots and separate them by "
                "commas, for example localhost:2,node1:4."
            )
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.hostname}:{self.slots}"


@dataclass(frozen=True)
class Slot:
    """The place of one rank, Horovod's `SlotInfo`. `cross_*` count the hosts with a process of that `local_rank`."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """The fields but the host, in Horovod's order, with commas between."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))

    def world(
        self, rendezvous: RendezvousEndpoint, *, worker: int | None = None, generation: int = 0, elastic: bool = False
    ) -> World:
        """The World of the worker in this slot. `worker`: its number, the rank unless given."""
        worker = self.rank if worker is None else worker
        return World(
            **vars(self), generation=generation, worker=worker, elastic=elastic, launcher="hora", rendezvous=rendezvous
        )


# Horovod's value for a host without a place in the job.
INVALID_SLOT_INFO = Slot(hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse `host:slots,host:slots`; blanks around commas are allowed."""
    return [HostInfo.from_string(item) for item in hosts_string.split(",")]


def parse_hosts_and_slots(hosts_string: str) -> tuple[list[str], dict[str, int]]:
    """Return the host names in order, and the slots of each. A host named twice has the sum of its slots."""
    slots = slots_by_host(parse_hosts(hosts_string))
    return list(slots), slots


def parse_host_files(filename: str | Path) -> str:
    """Parse a hostfile: `name slots=N`, `name:N` or `name` (one slot) per line, blank lines and # comments skipped."""
    try:
        text = Path(filename).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the hostfile {str(filename)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the hostfile {str(filename)!r} is not a text file") from None
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOSTFILE_LINE.fullmatch(content)
        if not match:
            raise ValueError(
                f"Invalid host input in {str(filename)!r}, line {number}: {content!r}. "
                "Write each line as `name slots=N` or `name:N`."
            )
        hosts.append(f"{match[1]}:{match[2] or match[3] or 1}")
    if not hosts:
        raise ValueError(f"the hostfile {str(filename)!r} names no host; add lines such as `node1 slots=4`")
    return ",".join(hosts)


def get_host_assignments(hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None) -> list[Slot]:
    """Assign ranks to slots in host order, at most `max_num_proc`. Raises ValueError for fewer than `min_num_proc`."""
    slots = slots_by_host(hosts)
    num_slots = sum(slots.values())
    if num_slots < min_num_proc:
        found = ",".join(f"{name}:{count}" for name, count in slots.items())
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({num_slots}) on "
            f"{found or 'no host'}. Ask for fewer processes, or add hosts or slots."
        )
    size = num_slots if max_num_proc is None else min(num_slots, max_num_proc)
    return place_ranks(list(islice((name for name, count in slots.items() for _ in range(count)), size)))


def place_ranks(hostnames: Sequence[str], local_order: Sequence[int] | None = None) -> list[Slot]:
    """Return the slots of ranks 0, 1, 2, …; `hostnames` has the host of each.

    Local ranks follow the ranks, or the numbers of `local_order`, one per rank, if given.
    """
    size = len(hostnames)
    order = range(size) if local_order is None else local_order
    local: dict[str, list[int]] = {name: [] for name in hostnames}  # host -> its ranks, in the order of local ranks
    for rank in sorted(range(size), key=order.__getitem__):
        local[hostnames[rank]].append(rank)
    owners: dict[int, list[str]] = {}  # local rank -> the hosts that have it, in order
    for name, ranks in local.items():
        for local_rank in range(len(ranks)):
            owners.setdefault(local_rank, []).append(name)
    local_ranks = {rank: local_rank for ranks in local.values() for local_rank, rank in enumerate(ranks)}
    cross_ranks = {(found, name): i for found, names in owners.items() for i, name in enumerate(names)}
    return [
        Slot(
            hostname=name,
            rank=rank,
            local_rank=(local_rank := local_ranks[rank]),
            cross_rank=cross_ranks[local_rank, name],
            size=size,
            local_size=len(local[name]),
            cross_size=len(owners[local_rank]),
        )
        for rank, name in enumerate(hostnames)
    ]


def visible_gpus(own: Sequence[str], on_host: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the GPUs visible to a rank: the first GPU of every local rank, in rank order, then all others of the host.

    `torch.cuda.set_device(hvd.local_rank())` then picks a GPU that was given to this very rank. Where ranks share a GPU
    (fractional amounts) no such order exists, because CUDA refuses a device named twice: a rank sees its own only.
    """
    firsts = [gpus[0] for gpus in on_host if gpus]
    if len(set(firsts)) < len(on_host):
        return tuple(own)
    rest = [gpu for gpus in on_host for gpu in gpus[1:]]
    return tuple(dict.fromkeys(firsts + rest))


def slots_by_host(hosts: Iterable[HostInfo]) -> dict[str, int]:
    """Return how many slots each host has; one named twice has the sum."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.hostname] = slots.get(host.hostname, 0) + host.slots
    return slots
