"""The runtime: this process's part of a running world, from `init` to `shutdown`.

It meets the other ranks, finds out who shares a host with whom, gives every process set its queue, and hands requests to
queues. One runtime exists at a time; `hora.engine` keeps it. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from hora.config import EngineConfig
from hora.engine.hub import Hub, HubEvents
from hora.engine.peers import Peers, check_ranks, check_ranks_at_init
from hora.engine.plan import Batch
from hora.engine.process_sets import ProcessSets
from hora.engine.queue import OperationQueue
from hora.engine.request import Kind, ReduceOp, Request, Signature
from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.shm.segment import SharedMemory
from hora.engine.status import WorldStatus
from hora.engine.transport.base import Transport
from hora.engine.transport.factory import make_transport
from hora.engine.transport.local import LocalTransport
from hora.errors import HorovodInternalError
from hora.events import Timeline
from hora.world import World

__all__ = ["Runtime"]

_GOODBYE_LIMIT_S = 2.0


class Runtime:
    """One initialised world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config
        self.timeline: Timeline | None = None
        self.status = WorldStatus()
        self._epoch = f"{world.generation}.{epoch}"
        self._handles: dict[int, tuple[OperationQueue, Request]] = {}
        self._next_handle = itertools.count()
        self._peers: Peers | None = None  # none in a world of one
        self.process_sets = ProcessSets(world, config, self.status, host=self)
        self.pid = os.getpid()

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks and set up every process set. Blocks until all are there, within the limit."""
        size = self.world.size
        try:
            wanted = [sorted(ranks) for ranks in process_sets]
            if size > 1:
                self._peers = Peers(self.world, self.config, self._epoch, self._hub_events())
                self.process_sets.peers = self._peers
                wanted = self._peers.meet(wanted)
            sets = [check_ranks_at_init(ranks, size) for ranks in wanted]
            with self._peers_may_go():
                for ranks in (tuple(range(size)), *(ranks for ranks in sets if len(ranks) < size)):
                    self.process_sets.register(ranks)
                if self._peers is not None:
                    # A rank that went on and left again at once would take away what others are still fetching from it.
                    self._peers.gather("ready", b"1")
        except BaseException:
            self.close()
            raise
        if self.config.timeline and self.config.timeline.upper() != "DYNAMIC":
            self.start_timeline(self.config.timeline, self.config.timeline_mark_cycles)

    def _peers_may_go(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._peers is None else self._peers.peers_may_go()

    @property
    def _hub(self) -> Hub | None:
        return None if self._peers is None else self._peers.hub

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks that proved to share memory."""
        return [[0]] if self._peers is None else self._peers.hosts

    # Operations.

    def submit(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor] = (),
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        name: str | None = None,
        op: int = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root_rank: int = -1,
        splits: Sequence[int] | torch.Tensor | None = None,
        process_set_id: int = 0,
        grouped: bool = False,
        background: bool = True,
    ) -> int:
        """Put an operation in flight; returns its handle. With `background=False` only `synchronize` drives it."""
        queue = self.process_sets.queue(process_set_id)
        if kind is Kind.ALLREDUCE and op == ReduceOp.ADASUM:
            self._check_adasum(process_set_id)
        if kind in (Kind.BARRIER, Kind.JOIN):
            # Reserved names, and numbered all the same: two barriers of two threads are two barriers.
            request = Request(Signature(int(kind), kind.name.lower(), None), (), None)
        else:
            request = queue.validator.request(
                kind,
                tensors,
                outputs=outputs,
                name=name,
                op=op,
                prescale=prescale,
                postscale=postscale,
                root_rank=root_rank,
                splits=splits,
                grouped=grouped,
            )
            if request.signature.device == "cuda":
                request.device_event = torch.cuda.current_stream(request.tensors[0].device).record_event()
        return self.put_in_flight(queue, request, background=background)

    def put_in_flight(self, queue: OperationQueue, request: Request, *, background: bool) -> int:
        """Hand a request to its queue; returns its handle."""
        handle = next(self._next_handle)
        self._handles[handle] = (queue, request)
        try:
            queue.submit(request, background=background)
        except BaseException:
            del self._handles[handle]
            raise
        return handle

    def poll(self, handle: int) -> bool:
        """Whether the operation is done. ValueError for an unknown handle."""
        entry = self._handles.get(handle)
        if entry is None:
            raise ValueError(f"handle {handle} was not created or has been synchronized already")
        return entry[1].done

    def synchronize(self, handle: int) -> Any:
        """Wait for the operation, free the handle, and return the outputs; None for an unknown handle."""
        entry = self._handles.get(handle)
        if entry is None:
            return None
        queue, request = entry
        if not request.done:
            queue.wait(request)
        self._handles.pop(handle, None)
        if request.error is not None:
            raise HorovodInternalError(*request.error.args)
        if request.device_event is not None:
            stream = torch.cuda.current_stream(request.tensors[0].device)
            stream.wait_event(request.device_event)
            for target, result in request.copy_back:
                target.detach().copy_(result)
            for tensor in request.outputs or ():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return request.result if request.result is not None else request.outputs

    def execute(self, kind: Kind, tensors: Sequence[torch.Tensor] = (), **arguments: Any) -> Any:
        """A blocking operation: submit and synchronize without the background thread."""
        return self.synchronize(self.submit(kind, tensors, background=False, **arguments))

    def barrier(self, process_set_id: int = 0) -> None:
        """Return when every member has called."""
        self.execute(Kind.BARRIER, process_set_id=process_set_id)

    def join(self) -> int:
        """Take no further part until every rank has joined; returns the rank that joined last."""
        # In every set, so that its other members need not wait for what will not come.
        barriers = [barrier for queue in self.process_sets.queues() for barrier in queue.barriers]
        for barrier in barriers:
            barrier.leave()
        others = [queue.process_set_id for queue in self.process_sets.queues() if queue.process_set_id]
        handles = [self.submit(Kind.JOIN, process_set_id=number) for number in others]
        last = int(self.execute(Kind.JOIN))
        for handle in handles:
            self.synchronize(handle)
        for barrier in barriers:
            barrier.come_back()
        self.barrier()  # no rank may wait at one of them before all have come back to it
        return last

    # Process sets.

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks (collective); returns its number."""
        self._check_dynamic("add_process_set")
        wanted = check_ranks(ranks, self.world.size)
        number = self.process_sets.find(wanted)
        if number is not None:
            raise ValueError(f"a process set with the ranks {list(wanted)} exists already: number {number}")
        return int(self._control(self.process_sets.queue(0), Kind.ADD_PROCESS_SET, wanted))

    def remove_process_set(self, process_set_id: int) -> bool:
        """Remove a set on all ranks (collective). False for the global set and unknown ones."""
        self._check_dynamic("remove_process_set")
        if process_set_id == 0 or process_set_id not in self.process_sets:
            return False
        return bool(self._control(self.process_sets.queue(0), Kind.REMOVE_PROCESS_SET, (process_set_id,)))

    def shared_memory(self, process_set_id: int, num_bytes: int) -> SharedMemory | None:
        """The same zeroed memory for all members (collective); None where they share no host, or it is too little."""
        queue, peers = self.process_sets.queue(process_set_id), self._peers
        if peers is None or len(queue.ranks) == 1 or not peers.share_memory(queue.ranks):
            return None
        segment = self._control(queue, Kind.SHARED_MEMORY, (process_set_id, num_bytes))
        return None if segment is None else SharedMemory(segment)

    def shared_barrier(self, memory: SharedMemory, *, name: str, process_set_id: int = 0) -> SharedMemoryBarrier:
        """A barrier of the members in the next piece of their memory (collective)."""
        queue, config = self.process_sets.queue(process_set_id), self.config
        barrier = SharedMemoryBarrier(
            memory.segment,
            memory.reserve(SharedMemoryBarrier.num_bytes(len(queue.ranks))),
            member=queue.member,
            ranks=queue.ranks,
            name=name,
            # Unlike an agreed operation, this one has not begun: after a goodbye the others will not come any more.
            guard=self.status.check_open,
            warning_s=0.0 if config.stall_check_disable else config.stall_warning_s,
            shutdown_s=config.stall_shutdown_s if config.stall_shutdown_s >= config.stall_warning_s else 0.0,
            stalled=self.stalled,
        )
        queue.barriers.add(barrier)
        return barrier

    def control_batch(self, batch: Batch) -> Any:
        """Carry out what `_control` requested when all have agreed to it, on the thread that drives the queue."""
        values = batch.signature.extra
        if batch.kind is Kind.ADD_PROCESS_SET:
            return self.process_sets.register(tuple(values))
        if batch.kind is Kind.SHARED_MEMORY:
            assert self._peers is not None
            number, num_bytes = values
            label = f"{self.process_sets.label(number)}/memory"
            return self._peers.share_or_none(label, self.process_sets.ranks(number), num_bytes)
        (number,) = values
        self.process_sets.remove(number)
        return True

    def _control(self, queue: OperationQueue, kind: Kind, values: Sequence[int]) -> Any:
        request = Request(Signature(int(kind), kind.name.lower(), None, extra=tuple(values)), (), None)
        queue.submit(request, background=False)
        queue.wait(request)
        if request.error is not None:
            raise HorovodInternalError(*request.error.args)
        return request.result

    def _check_dynamic(self, what: str) -> None:
        if not self.config.dynamic_process_sets:
            raise ValueError(
                f"{what} needs dynamic process sets: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), "
                'or call hvd.init(process_sets="dynamic")'
            )
        self.status.check_open()

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

    # Timeline.

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Rank 0 begins to write a trace; a trace to another file ends."""
        if self.world.rank != 0 or (self.timeline is not None and self.timeline.path == path):
            return
        self.stop_timeline()
        self.timeline = Timeline(path, mark_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    # The end.

    def shutdown(self) -> None:
        """Leave the world, which ends it for every rank; what was agreed is still carried out."""
        if self.pid != os.getpid():
            return  # a forked child: the world is its parent's
        text = f"Horovod has been shut down by rank {self.world.rank}"
        self.status.close(text)
        for queue in self.process_sets.queues():
            queue.drain()
        if self._hub is not None:
            self._hub.leave(text)
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
        self.stop_timeline()

    def settled(self) -> None:
        """Tell the rank that leaves that nothing more is needed of it."""
        hub = self._hub
        if (
            hub is not None
            and self.world.rank not in hub.goodbyes
            and not any(queue.num_in_flight for queue in self.process_sets.queues())
        ):
            hub.leave(self.status.reason)

    def stalled(self, ranks: Sequence[int], text: str) -> None:
        """End the job for everybody because these ranks keep the others waiting."""
        self._broken(f"rank(s) {', '.join(map(str, ranks))} {text}; Horovod has been shut down", tell=True)

    def failed(self, text: str) -> None:
        """End the job for everybody because this rank could not carry out what was agreed."""
        self._broken(f"a collective failed on rank {self.world.rank}: {text}; Horovod has been shut down", tell=True)

    def lost(self, rank: int, how: str) -> None:
        """The launcher tells that a rank is gone."""
        hub = self._hub
        if rank != self.world.rank and hub is not None and rank not in hub.goodbyes:
            self._broken(f"rank {rank} {how}. Horovod has been shut down")
            hub.stop_waiting(self.status.reason)

    def _broken(self, text: str, *, tell: bool = False) -> None:
        self.status.fault(text)
        if tell and self._hub is not None:
            self._hub.report_fault(self.world.rank, text)
        for queue in self.process_sets.queues():
            queue.agreement.wake()

    # What the hub reports, on its thread.

    def _hub_events(self) -> HubEvents:
        return HubEvents(
            lost=self._on_lost,
            leaving=self._on_leaving,
            fault=self._on_fault,
            announced=self.process_sets.deliver,
            tick=self._on_tick,
        )

    def _on_lost(self, rank: int) -> None:
        assert self._peers is not None
        self._broken(
            f"{self._peers.describe(rank)} was lost: its connection ended without a goodbye. "
            "It was killed, crashed, or its host is unreachable. Horovod has been shut down"
        )

    def _on_leaving(self, rank: int, why: str) -> None:
        self.status.close(why)
        for queue in self.process_sets.queues():
            queue.agreement.wake()
        self.settled()

    def _on_fault(self, rank: int, text: str) -> None:
        self._broken(text)

    def _on_tick(self) -> None:
        for queue in self.process_sets.queues():
            queue.inspect()

    def transport(self, queue: OperationQueue, device: str) -> Transport:
        """Make the transport of a queue for a device type (collective among its members)."""
        if self._peers is None or len(queue.ranks) == 1:
            return LocalTransport()
        label = self.process_sets.label(queue.process_set_id)
        near = self._peers.topology(label, device, queue.ranks, self.status.guard)
        return make_transport(near, device, queue.transport)
