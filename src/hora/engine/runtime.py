"""The runtime: this process's part of a running world, from `init` to `shutdown`.

It meets the other ranks (`peers`), gives every process set its queue (`process_sets`), hands requests to the queues,
and tells the world's status (`status`) what the hub reports. One runtime exists at a time; `process` keeps it. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence

import torch

from hora.config import EngineConfig
from hora.engine.hub import Hub, HubEvents, Rounds
from hora.engine.lane import Lane
from hora.engine.peers import Peers
from hora.engine.process_sets import ProcessSets, check_ranks
from hora.engine.queue import OperationQueue
from hora.engine.request import Call, Kind, Reduce, ReduceOp, Request, Signature
from hora.engine.shm.segment import SharedMemory
from hora.engine.status import Recorder, StallLimits, WorldStatus
from hora.net.wire import Header, derived_secret, new_secret
from hora.world import World

__all__ = ["Runtime"]

_GOODBYE_LIMIT_S = 2.0
_FAREWELL_LIMIT_S = 1.0
_SUM = Reduce()


class Runtime:
    """One initialised world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config
        self.num_joins = 0
        self.is_current = True  # `process` has no other, and this process started it
        self.recorder = Recorder(world.rank)
        self.status = WorldStatus(world.rank, tell=self._report_fault, wake=lambda: self.process_sets.wake())
        self.process_sets = ProcessSets(world, config, self.status, self.recorder)
        self._epoch = f"{world.generation}.{epoch}"
        self._handles: dict[int, tuple[OperationQueue, Request]] = {}
        self._next_handle = itertools.count()
        self._peers: Peers | None = None  # none in a world of one
        # Of ranks that leave: why, having seen what; until when to wait.
        self._farewells: list[tuple[str, Rounds, float]] = []
        self._solo_secret = new_secret()  # of a world of one

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks and set up every process set. Blocks until all are there, within the limit."""
        size = self.world.size
        try:
            wanted = [sorted(ranks) for ranks in process_sets]
            if size > 1:
                events = HubEvents(
                    lost=self._on_lost,
                    leaving=self._on_leaving,
                    fault=self._broken,
                    agreeing=self._on_agreeing,
                    in_flight=self.process_sets.in_flight,
                    tick=self._on_tick,
                )
                self._peers = Peers(self.world, self.config, self._epoch, events, self.status.check_alive)
                self.process_sets.peers = self._peers
                wanted = self._peers.meet(wanted)
                self.config = self._peers.config
            try:
                sets = [check_ranks(ranks, size) for ranks in wanted]  # which are the same on all ranks
            except ValueError as error:
                raise ValueError(f"Horovod initialization failed: {error}") from None
            with contextlib.nullcontext() if self._peers is None else self._peers.peers_may_go():
                for ranks in (tuple(range(size)), *(ranks for ranks in sets if len(ranks) < size)):
                    self.process_sets.register(ranks)
                if self._peers is not None:
                    # A rank that went on and left again at once would take away what others are still fetching from it.
                    self._peers.gather("ready", b"1")
        except BaseException:
            self.close()
            raise
        if self.config.timeline and self.config.timeline.upper() != "DYNAMIC":
            self.recorder.start(self.config.timeline, mark_cycles=self.config.timeline_mark_cycles)

    def secret_for(self, purpose: str) -> bytes:
        """A secret that the ranks of this world have in common, and no other process has."""
        return derived_secret(self._solo_secret if self._peers is None else self._peers.keys.shared, purpose)

    @property
    def _hub(self) -> Hub | None:
        return None if self._peers is None else self._peers.hub

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks that proved to share memory."""
        return [[0]] if self._peers is None else self._peers.hosts

    @property
    def num_hosts(self) -> int:
        """The number of hosts between which data travels over a network; a rank that may share no memory is one."""
        return 1 if self._peers is None else len(self._peers.sharing)

    def spans_hosts(self, process_set_id: int, *, in_order: bool = False) -> bool:
        """Return whether a set's members are on several hosts, so that CPU reductions travel over a network and
        `submit` takes a code for them. `in_order`: and are numbered host by host.
        """
        ranks, peers = self.process_sets.ranks(process_set_id), self._peers
        return peers is not None and peers.spans_hosts(ranks) and (not in_order or peers.in_host_order(ranks))

    # Operations.

    def submit(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor] = (),
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        name: str | None = None,
        reduce: Reduce = _SUM,
        root_rank: int = -1,
        splits: Sequence[int] | torch.Tensor | None = None,
        process_set_id: int = 0,
        grouped: bool = False,
        residuals: Sequence[torch.Tensor] = (),
        background: bool = True,
    ) -> int:
        """Put an operation in flight; returns its handle. With `background=False` only `synchronize` drives it.

        `residuals`: what a code of `reduce` loses of each tensor; see `Signature`. Only where a set `spans_hosts`.
        """
        queue = self.process_sets.queue(process_set_id)
        if kind is Kind.ALLREDUCE and reduce.op == ReduceOp.ADASUM:
            self._check_adasum(process_set_id)
        if kind is Kind.BARRIER:
            request = _request_without_tensors(kind)
        else:
            request = queue.validator.request(Call(kind, name, reduce, root_rank, splits, grouped), tensors, outputs)
            request.residuals = residuals
            if request.signature.device != "cpu":
                request.device_event = torch.cuda.current_stream(request.tensors[0].device).record_event()
        return self.put_in_flight(queue, request, background=background)

    def put_in_flight(self, queue: OperationQueue, request: Request, *, background: bool = True) -> int:
        """`submit` for what is known to be right."""
        queue.submit(request, background=background)
        handle = next(self._next_handle)
        self._handles[handle] = (queue, request)
        return handle

    def poll(self, handle: int) -> bool:
        """Return whether the operation is done. ValueError for an unknown handle."""
        entry = self._handles.get(handle)
        if entry is None:
            raise ValueError(f"handle {handle} was not created or has been synchronized already")
        request = entry[1]
        return request.done and (
            request.device_event is None or request.error is not None or request.device_event.query()
        )

    def synchronize(self, handle: int) -> list[torch.Tensor]:
        """Wait for the operation, free the handle, and return the outputs; none for an unknown handle."""
        entry = self._handles.get(handle)
        if entry is None:
            return []
        queue, request = entry
        try:
            return queue.result(request)
        finally:
            if request.done:
                self._handles.pop(handle, None)

    def allreduce_(self, tensor: torch.Tensor, name: str, reduce: Reduce = _SUM, set_id: int = 0) -> torch.Tensor:
        """Reduce a tensor in place over a process set, and wait for it."""
        both, kind = [tensor], Kind.ALLREDUCE
        handle = self.submit(
            kind, both, outputs=both, name=name, reduce=reduce, process_set_id=set_id, background=False
        )
        self.synchronize(handle)
        return tensor

    def barrier(self, process_set_id: int = 0) -> None:
        """Return when every member has called."""
        self.synchronize(self.submit(Kind.BARRIER, process_set_id=process_set_id, background=False))

    def join(self) -> int:
        """Take no further part until every rank has joined; returns the rank that joined last."""
        self.num_joins += 1
        # In every set, so that its other members need not wait for what will not come.
        queues = self.process_sets.queues()
        if torch.cuda.is_initialized():
            for queue in queues:  # another thread, for which another GPU is the current one, may drive it
                queue.validator.settle(torch.device("cuda", torch.cuda.current_device()))
        lanes = [lane for queue in queues for lane in queue.lanes if isinstance(lane, Lane)]
        for lane in lanes:
            lane.leave()
        for lane in lanes:
            lane.finish_leaving()
        requests = [(queue, _request_without_tensors(Kind.JOIN)) for queue in queues]
        for queue, request in requests:
            # This thread waits for the world, and drives it meanwhile.
            queue.submit(request, background=queue.process_set_id != 0)
        for queue, request in requests:
            queue.result(request)
        for lane in lanes:
            lane.come_back()
        self.barrier()  # no rank may go on in one of them before all have come back to it
        return int(requests[0][1].answer)

    def _check_adasum(self, process_set_id: int) -> None:
        if process_set_id != 0:
            raise NotImplementedError(
                "Adasum does not support non-global process sets yet; reduce with Average or Sum there"
            )
        if self.world.size & (self.world.size - 1):
            raise NotImplementedError(
                "Adasum needs a number of ranks that is a power of 2; running with non-power of 2 ranks "
                f"({self.world.size}) is not supported"
            )

    def lane(self, memory: SharedMemory, process_set_id: int = 0, near: Sequence[int] | None = None) -> Lane:
        """A lane of the members, or of those of this host (`near`), in the next piece of their memory (collective)."""
        queue = self.process_sets.queue(process_set_id)
        offset = memory.reserve(Lane.num_bytes(len(queue.ranks if near is None else near)))
        return Lane(queue, memory.segment, offset, limits=StallLimits.of(self.config), near=near)

    # The end.

    def shutdown(self) -> None:
        """Leave the world, which ends it for every rank; what was agreed is still executed."""
        text = f"Horovod has been shut down by rank {self.world.rank}"
        self.status.close(text)
        self.process_sets.drain()
        if self._hub is not None:
            # Of a broken world the others may hear from here first, and should hear what broke it.
            why = self.status.reason if self.status.broken else text
            self._hub.leave(why, self.process_sets.rounds())
            if not self.status.broken:
                self._hub.wait_for_goodbyes(_GOODBYE_LIMIT_S)
        self.close()

    def close(self) -> None:
        """Release everything, without a word to the others."""
        self.status.close("Horovod has been shut down")
        self.process_sets.close()
        self._handles.clear()
        if self._peers is not None:
            self._peers.hub.close()
            self._peers = self.process_sets.peers = None
        self.recorder.stop()

    def lost(self, rank: int, how: str) -> None:
        """The launcher tells that a rank is gone."""
        hub = self._hub
        if rank != self.world.rank and hub is not None and rank not in hub.goodbyes:
            self._broken(f"rank {rank} {how}. Horovod has been shut down")

    def _report_fault(self, text: str) -> None:
        if self._hub is not None:
            self._hub.report_fault(self.world.rank, text)

    # What the hub reports, on its thread.

    def _on_lost(self, rank: int) -> None:
        assert self._peers is not None
        self._broken(self._peers.lost(rank))

    def _broken(self, text: str) -> None:
        self.status.fault(text)
        if self._hub is not None:
            self._hub.stop_waiting(self.status.reason)

    def _on_agreeing(self, serial: int, rank: int, header: Header, payload: bytes) -> None:
        self.process_sets.deliver(serial, rank, header, payload)
        self._close_if_caught_up()

    def _on_leaving(self, rank: int, why: str, rounds: Rounds) -> None:
        self._farewells.append((why, rounds, time.monotonic() + _FAREWELL_LIMIT_S))
        self._close_if_caught_up()

    def _close_if_caught_up(self) -> None:
        """End the world that another rank has left, not before the rounds have come that it has executed.

        It may wait for this rank in one of them, and goodbyes come another way than the rounds of a set.
        """
        for why, rounds, deadline in self._farewells:
            if not self.process_sets.lacks(rounds) or time.monotonic() > deadline:
                self._farewells = []
                self.status.close(why)
                self.process_sets.say_goodbye_if_idle()
                return

    def _on_tick(self) -> None:
        self._close_if_caught_up()
        self.process_sets.inspect()


def _request_without_tensors(kind: Kind) -> Request:
    # No name of its own, so that they are numbered: two barriers of two threads are two barriers.
    return Request(Signature(int(kind), kind.name.lower(), None))
