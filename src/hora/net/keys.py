"""Distribution of keys, so that a host speaks for its own workers and ranks and for no others.

    job's secret      the launcher's alone
    worker's key      one for each worker, for life: its host holds it, and it opens no door under another number
    world's secret    one for each generation and initialisation, the launcher's alone; of it every rank is given
        shared        what all ranks have in common: objects are signed with it
        accepting     from which it derives the keys of those who connect to it
        towards r     the key with which it connects to rank r; no other rank holds it

A rank cannot make `towards r` of another rank, so it cannot pass for that one at r; and a worker without a place in a
generation is given none of its keys. Where a launcher gives all ranks one secret (torchrun, mpirun, srun with a secret
file), each derives everything itself: there any of them could speak for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hora.net.wire import SECRET_BYTES, Credentials, derived_secret

__all__ = ["RankKeys", "rank_keys", "worker_credentials", "worker_key", "world_secret"]

# `(ranks) -> keys`: shared, accepting, and those towards these ranks, one after the other.
GetKeys = Callable[[Sequence[int]], bytes]


def worker_key(job_secret: bytes, worker: int) -> bytes:
    """Return a worker's own key; for -1, a holder of the job's secret, that secret."""
    return job_secret if worker < 0 else derived_secret(job_secret, f"worker {worker}")


def worker_credentials(job_secret: bytes, job: str, worker: int) -> Credentials:
    """With which a worker connects to its launcher."""
    return Credentials(worker_key(job_secret, worker), job, worker)


def world_secret(job_secret: bytes, epoch: str) -> bytes:
    """From which the keys of a world derive. `epoch`: its generation, and which initialisation of it."""
    return derived_secret(job_secret, f"the world {epoch}")


def rank_keys(world: bytes, rank: int, towards: Sequence[int]) -> bytes:
    """Return a rank's keys, one after the other."""
    keys = [derived_secret(world, "shared"), _accepting(world, rank)]
    return b"".join([*keys, *(_from(_accepting(world, other), rank) for other in towards)])


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + SECRET_BYTES] for at in range(0, len(keys), SECRET_BYTES)]


def _accepting(world: bytes, rank: int) -> bytes:
    return derived_secret(world, f"to rank {rank}")


def _from(accepting: bytes, rank: int) -> bytes:
    return derived_secret(accepting, f"from rank {rank}")


class RankKeys:
    """A rank's keys in one world. `get` fetches them from where they are, or derives them."""

    def __init__(self, rank: int, get: GetKeys, *, at_once: Sequence[int] = ()) -> None:
        self.rank = rank
        self._get = get
        self._towards: dict[int, bytes] = {}
        self.shared, self._accepting, *keys = _cut(get(at_once))
        self._towards.update(zip(at_once, keys, strict=True))

    @classmethod
    def derived(cls, world: bytes, rank: int) -> RankKeys:
        """Derive the keys from the world's secret, which every rank holds."""
        return cls(rank, lambda ranks: rank_keys(world, rank, ranks))

    def fetch(self, ranks: Sequence[int]) -> None:
        """Have the keys towards these ranks at hand, at the price of one question."""
        missing = [rank for rank in ranks if rank not in self._towards and rank != self.rank]
        if missing:
            self._towards.update(zip(missing, _cut(self._get(missing))[2:], strict=True))

    def towards(self, rank: int) -> Credentials:
        """With which we connect to this rank."""
        self.fetch([rank])
        return Credentials(self._towards[rank], "hub", self.rank)

    def of(self, rank: int) -> Credentials:
        """With which this rank connects to us."""
        return Credentials(_from(self._accepting, rank), "hub", rank)
