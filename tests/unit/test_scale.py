"""Many ranks in one process cause the traffic given in docs/scale.md.

`make scale` runs a thousand of them.
"""

from __future__ import annotations

from benchmarks.scale import Worker, meet

from hora.net.rendezvous import Rendezvous
from hora.net.wire import new_secret
from hora.world import RendezvousEndpoint, World


class Events:
    """Events of a launcher that starts nothing."""

    def __getattr__(self, name):
        return lambda *args: None


def bytes_to_each(size: int) -> float:
    """Return the bytes that the rendezvous sends to each of `size` workers on average."""
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret=secret, job="scale", events=Events())
    rendezvous = RendezvousEndpoint(kind="hora", address="127.0.0.1", port=server.port, job="scale")
    server.publish(0, {rank: World(rank=rank, size=size, worker=rank, rendezvous=rendezvous) for rank in range(size)})
    workers = [Worker(rank) for rank in range(size)]
    try:
        meet(server.port, secret, workers, ranks_per_host=8)
        assert {(worker.traffic.messages_out, worker.traffic.messages_in) for worker in workers} == {(5, 5)}
        return sum(worker.traffic.bytes_in for worker in workers) / size
    finally:
        for worker in workers:
            worker.close()
        server.close()


def test_the_cost_of_a_rendezvous_per_rank_does_not_depend_on_their_number():
    few, many = bytes_to_each(8), bytes_to_each(64)
    assert few < many < few + 200  # the parent rank's address, and longer numbers
