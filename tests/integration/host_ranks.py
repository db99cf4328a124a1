"""Start ranks that run `two_hosts_rank` on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import two_hosts_rank
from namespaces import Host

LIMIT_S = 180


def _context() -> Any:
    """Return the context of a fork server that preloads torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "numpy"])
    return context


def run_ranks(
    hosts: Sequence[Host],
    secret: str,
    mode: str,
    *,
    address: str,
    sizes: Sequence[int] = (2, 2),
    lost: Sequence[int] = (),
    then: Callable[[Sequence[int]], None] = lambda pids: None,
    **environment: str,
) -> list[dict]:
    """Start `sizes[h]` ranks on each host h, with the rendezvous at the first host's address. Call `then` with their
    pids when all of them run; return their answers."""
    context = _context()
    started, answers = [], []
    for host, local_size in enumerate(sizes):
        for local_rank in range(local_size):
            place = {
                "HOROVOD_RANK": len(started),
                "HOROVOD_SIZE": sum(sizes),
                "HOROVOD_LOCAL_RANK": local_rank,
                "HOROVOD_LOCAL_SIZE": local_size,
                "HOROVOD_CROSS_RANK": host,
                "HOROVOD_CROSS_SIZE": len(sizes),
                "HOROVOD_HOSTNAME": f"host{host}",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": 60,
                "HOROVOD_DYNAMIC_PROCESS_SETS": 1,
                "MASTER_ADDR": address,
                "MASTER_PORT": 29400,
                "HORA_SECRET_FILE": secret,
                "HORA_STRICT": 1,
                **environment,
            }
            here, there = context.Pipe()
            env = {name: str(value) for name, value in place.items()}
            process = context.Process(target=two_hosts_rank.run, args=(hosts[host].namespace, env, mode, there))
            process.start()
            there.close()
            started.append(process)
            answers.append(here)
    try:
        for rank, answer in enumerate(answers):
            assert answer_of(f"rank {rank}", answer) == "running"
        then([process.pid for process in started])
        for rank, answer in enumerate(answers):
            if rank not in lost:
                with contextlib.suppress(OSError):  # it has already answered and exited
                    answer.send("finish")
        return [{} if rank in lost else answer_of(f"rank {rank}", answer) for rank, answer in enumerate(answers)]
    finally:
        for process in started:
            process.join(10)
            process.kill()


def answer_of(who: str, answer: Any) -> Any:
    assert answer.poll(LIMIT_S), f"{who} gave no answer within {LIMIT_S} s"
    try:
        return answer.recv()
    except EOFError:
        raise AssertionError(f"{who} ended without an answer; see its output") from None


class Helper:
    """A process beside the ranks that runs one function of `two_hosts_rank` for the duration of the `with` block."""

    def __init__(self, do: Callable[..., None], *arguments: Any) -> None:
        context = _context()
        self._here, self._there = context.Pipe()
        self._process = context.Process(target=do, args=(*arguments, self._there))

    def __enter__(self) -> Helper:
        self._process.start()
        self._there.close()
        assert answer_of("a helper", self._here) == "running"
        return self

    def ask(self, question: Any) -> Any:
        """Send a question and return the answer."""
        self._here.send(question)
        return answer_of("a helper", self._here)

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has answered, or never will
        self._process.join(10)
