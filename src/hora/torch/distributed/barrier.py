"""`Barrier`: barriers, of which the monitored one names the missing members."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

from hora.engine.request import Kind, Request, Signature
from hora.errors import HorovodInternalError
from hora.torch.distributed.calls import listed, waits
from hora.torch.distributed.messages import SendRecv
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work

_BARRIER_TAG = -(2**31)  # tag of monitored_barrier's messages, which users cannot use


class Barrier(RepeatedCalls, SendRecv):
    """barrier and monitored_barrier."""

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; after the timeout member 0 names the missing ones."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        if self._rank:
            answer = torch.zeros_like(self._token)
            self.send([self._token], 0, _BARRIER_TAG).wait(timedelta(seconds=limit_s))
            # Member 0 answers after its own timeout, when it has asked for the others' positions.
            self.recv([answer], 0, _BARRIER_TAG).wait(timedelta(seconds=2 * limit_s + 5))
            if not answer.item():
                raise HorovodInternalError(
                    f"Rank {self._own_rank} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank {self._ranks[0]}: see the error of that one"
                )
        else:
            self._answer_members(limit_s, wait_all_ranks=wait_all_ranks)
        self.wait_for_all("monitored_barrier")  # every member has its answer before one may leave the job

    def _answer_members(self, limit_s: float, *, wait_all_ranks: bool) -> None:
        """Tell the members that have arrived whether all have; raises an error that names the missing ones."""
        deadline = time.monotonic() + limit_s
        missing, members = [], range(1, self._size)
        works = {member: self.recv([torch.zeros_like(self._token)], member, _BARRIER_TAG) for member in members}
        for member, work in works.items():
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except HorovodInternalError:
                missing.append(self._ranks[member])
                if not wait_all_ranks:
                    break
        for member in [member for member, work in works.items() if work.is_success()]:
            self.send([torch.full_like(self._token, not missing)], member, _BARRIER_TAG)
        if missing:
            raise HorovodInternalError(
                f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass monitoredBarrier: Rank "
                f"{self._ranks[0]} timed out in monitoredBarrier after {round(limit_s * 1000)} ms; "
                + listed(self._runtime.lines_of(missing))
            )

    def wait_for_all(self, operation: str) -> None:
        """Wait for every member, without counting as a call of the user."""
        request = self._submit_barrier(operation, wait=True)
        self._finish_in_time(request)

    def barrier(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not BarrierOptions:
            given = (*arrange("barrier", given, named),)
        (opts,) = given
        work = self._again("barrier", self._token, self._token, opts)
        if work is not None:
            return work
        self._check_here()
        request = self._submit_barrier("barrier", wait=waits(opts))
        self._remember("barrier", request)
        return self._work([request], [], opts)

    def _submit_barrier(self, operation: str, *, wait: bool) -> Request:
        request = Request(Signature(int(Kind.BARRIER), self._label(operation), None))
        self._queue.submit(request, background=not wait)
        return request
