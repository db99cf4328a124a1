"""The runtime: this process's part of a running world, from `init` to `shutdown`.

It connects to the other ranks (`bootstrap`), submits operations to the queues of the process sets (`process_sets`), and
passes the control tree's reports to the world's status (`status`). `process` keeps the only one. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent

"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from hora.config import EngineConfig
from hora.engine.bootstrap import Bootstrap
from hora.engine.control_tree import ControlEvents, ControlTree, Rounds
from hora.engine.point_to_point import Messages
from hora.engine.process_sets import ProcessSets, checked_ranks, request_without_tensors
from hora.engine.queue import OperationQueue
from hora.engine.request import CollectiveCall, Key, Kind, Reduce, ReduceOp, Request
from hora.engine.schedule import ReductionSchedule
from hora.engine.status import TimelineRecorder, WorldStatus
from hora.net.wire import Header, Stream, derived_secret, new_secret
from hora.world import World

__all__ = ["Runtime"]

log = logging.getLogger("hora")

_GOODBYE_LIMIT_S = 2.0
_FAREWELL_LIMIT_S = 1.0
_SUM = Reduce()
_ASK_LIMIT_S = 2.0


class Runtime:
    """One initialized world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config  # `start` replaces the common values with rank 0's
        self.num_joins = 0
        self.is_current = True  # `process` has no other, and this process started it
        self.recorder = TimelineRecorder(world.rank)
        self.status = WorldStatus(world.rank, tell=self._report_fault, wake=self._wake)
        self.sets = ProcessSets(world, self.status, self.recorder, self._say_goodbye_if_idle)
        self._epoch = f"{world.generation}.{epoch}"
        self._handles: dict[int, tuple[OperationQueue, Request]] = {}
        self._next_handle = itertools.count()
        self._bootstrap: Bootstrap | None = None  # None in a world of one
        self._solo_secret = new_secret()  # of a world of one
        # Of leaving ranks: the reason, the rounds they have seen, and the time limit.
        self._farewells: list[tuple[str, Rounds, float]] = []
        self._messages: Messages | None = None

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks and set up every process set. Blocks until all have arrived, within the limit."""
        size = self.world.size
        try:
            wanted = [sorted(ranks) for ranks in process_sets]
            if size > 1:
                events = ControlEvents(
                    lost=self._on_lost,
                    leaving=self._on_leaving,
                    fault=self._broken,
                    negotiating=self._on_negotiating,
                    whereabouts=self.sets.whereabouts,
                    tick=self._on_tick,
                )
                self._bootstrap = Bootstrap(self.world, self.config, self._epoch, events, self.status.check_alive)
                wanted = self._bootstrap.meet(wanted)
                self.config = self._bootstrap.config
            try:
                sets = [checked_ranks(ranks, size) for ranks in wanted]  # the same on all ranks
            except ValueError as error:
                raise ValueError(f"Horovod initialization failed: {error}") from None
            with contextlib.nullcontext() if self._bootstrap is None else self._bootstrap.peers_may_go():
                self.sets.start(self.config, self._bootstrap, sets)
                if self._bootstrap is not None:
                    if self._bootstrap.can_share(range(size)):
                        self.sets.queue(0).transport()  # now, so that the first step is like any other
                    # A rank that continued and left at once would remove what others are still fetching from it.
                    self._bootstrap.gather("ready", b"1")
        except BaseException:
            self.close()
            raise
        if self.config.timeline and self.config.timeline.upper() != "DYNAMIC":
            self.recorder.start(self.config.timeline, mark_cycles=self.config.timeline_mark_cycles)

    def secret_for(self, purpose: str) -> bytes:
        """Return a secret that only the ranks of this world share."""
        return derived_secret(self._solo_secret if self._bootstrap is None else self._bootstrap.keys.shared, purpose)

    @property
    def _control_tree(self) -> ControlTree | None:
        return None if self._bootstrap is None else self._bootstrap.control_tree

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks that proved to share memory."""
        return [[0]] if self._bootstrap is None else self._bootstrap.hosts

    @property
    def num_hosts(self) -> int:
        """The number of hosts between which data uses a network; a rank that may not share memory counts as one."""
        return 1 if self._bootstrap is None else len(self._bootstrap.sharing)

    def spans_hosts(self, process_set_id: int, *, in_order: bool = False) -> bool:
        """Return whether a set's members are on several hosts, so that `submit` takes an encoding for CPU reductions.

        `in_order`: and whether they are numbered host by host.
        """
        ranks, peers = self.sets.ranks(process_set_id), self._bootstrap
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

        `residuals`: the encoding error of each tensor; see `Signature`. Only if a set `spans_hosts`.
        """
        queue = self.sets.queue(process_set_id)
        if kind is Kind.ALLREDUCE and reduce.op == ReduceOp.ADASUM:
            self._check_adasum(process_set_id)
        if kind is Kind.BARRIER:
            request = request_without_tensors(kind)
        else:
            request = queue.validator.request(
                CollectiveCall(kind, name, reduce, root_rank, splits, grouped), tensors, outputs
            )
            request.residuals = residuals
            if request.signature.device != "cpu":
                request.device_event = torch.cuda.current_stream(request.tensors[0].device).record_event()
        return self.put_in_flight(queue, request, background=background)

    def put_in_flight(self, queue: OperationQueue, request: Request, *, background: bool = True) -> int:
        """Submit a request that is already validated."""
        queue.submit(request, background=background)
        handle = next(self._next_handle)
        self._handles[handle] = (queue, request)
        return handle

    def poll(self, handle: int) -> bool:
        """Return whether the operation is done. Raises ValueError for an unknown handle."""
        entry = self._handles.get(handle)
        if entry is None:
            raise ValueError(f"handle {handle} was not created or has been synchronized already")
        request = entry[1]
        return request.done and (
            request.device_event is None or request.error is not None or request.device_event.query()
        )

    def when_done(self, handle: int, callback: Callable[[], None]) -> None:
        """Call `callback` when the operation is done, here or on the thread that finishes it.

        It must neither wait nor raise, and may be called twice.
        """
        request = self._handles[handle][1]
        request.on_done = callback
        if request.done:
            callback()

    def synchronize(self, handle: int) -> list[torch.Tensor]:
        """Wait for the operation, free the handle, and return the outputs; empty for an unknown handle."""
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
        """Wait until every member has called."""
        self.synchronize(self.submit(Kind.BARRIER, process_set_id=process_set_id, background=False))

    def join(self) -> int:
        """Take no further part until every rank has joined; returns the rank that joined last."""
        self.num_joins += 1
        # In every set, so that its other members do not wait in vain.
        queues = self.sets.queues()
        if torch.cuda.is_initialized():
            for queue in queues:  # the driving thread may have another current GPU
                queue.validator.settle(torch.device("cuda", torch.cuda.current_device()))
        schedules = [
            schedule for queue in queues for schedule in queue.schedules if isinstance(schedule, ReductionSchedule)
        ]
        for schedule in schedules:
            schedule.leave()
        for schedule in schedules:
            schedule.finish_leaving()
        requests = [(queue, request_without_tensors(Kind.JOIN)) for queue in queues]
        for queue, request in requests:
            # This thread waits for the world, and drives it meanwhile.
            queue.submit(request, background=queue.process_set_id != 0)
        for queue, request in requests:
            queue.result(request)
        for schedule in schedules:
            schedule.come_back()
        self.barrier()  # no rank may continue in one of them before all have come back to it
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

    def start_messages(self) -> Messages:
        """Prepare messages between ranks (collective over all of them); returns the existing object if there is one."""
        bootstrap = self._bootstrap
        if self._messages is not None or bootstrap is None:
            self._messages = self._messages or Messages(self.world.rank, [], None, self.status, _no_stream, _no_stream)
            return self._messages
        near = bootstrap.beside(range(self.world.size))
        segment = bootstrap.share("messages", near, Messages.num_bytes(len(near))) if len(near) > 1 else None
        self._messages = Messages(
            self.world.rank, near, segment, self.status, bootstrap.open_message_stream, bootstrap.take_message_stream
        )
        return self._messages

    # The end.

    def shutdown(self, *, behind: bool = False) -> None:
        """Leave the world, which ends it for every rank; agreed operations are still executed.

        `behind`: this process continues in another world, and connections are closed meanwhile.
        """
        text = f"Horovod has been shut down by rank {self.world.rank}"
        self.status.close(text)
        for queue in self.sets.queues():
            queue.drain()
            queue.settle()
        if self._control_tree is not None:
            if self.status.broken:  # the others may learn it from here first; then no rank waits for goodbyes
                self._report_fault(self.status.reason)
            self._control_tree.leave(self.status.reason if self.status.broken else text, self.sets.rounds())
            if not self.status.broken:
                self._control_tree.wait_for_goodbyes(_GOODBYE_LIMIT_S)
        self.close(behind=behind)

    def close(self, *, behind: bool = False) -> None:
        """Release everything without notifying the others."""
        self.status.close("Horovod has been shut down")
        self.sets.close()
        if self._messages is not None:
            self._messages.close(self.status.reason)
        self._handles.clear()
        if self._bootstrap is not None:
            control_tree, self._bootstrap = self._bootstrap.control_tree, None
            if behind:
                threading.Thread(target=control_tree.close, name="hora-control-close", daemon=True).start()
            else:
                control_tree.close()
        self.recorder.stop()

    def lost(self, rank: int, how: str) -> None:
        """Handle the launcher's report that a rank is gone."""
        control_tree = self._control_tree
        if rank != self.world.rank and control_tree is not None and rank not in control_tree.goodbyes:
            self._broken(f"rank {rank} {how}. Horovod has been shut down")
            control_tree.expect_nothing_of(rank)

    def _report_fault(self, text: str) -> None:
        if self._control_tree is not None:
            self._control_tree.report_fault(self.world.rank, text)

    def _wake(self) -> None:
        """Wake the threads that wait for other members, so that they recheck the world's status."""
        for queue in self.sets.queues():
            queue.interrupt()
        if self._messages is not None:
            self._messages.interrupt()

    def _say_goodbye_if_idle(self) -> None:
        """Tell the leaving rank that it is no longer needed."""
        control_tree = self._control_tree
        if control_tree is None or self.world.rank in control_tree.goodbyes:
            return
        if not any(queue.num_in_flight for queue in self.sets.queues()):
            control_tree.leave(self.status.reason, self.sets.rounds())

    # What the control tree reports, on its thread.

    def _on_lost(self, rank: int) -> None:
        assert self._bootstrap is not None
        self._broken(self._bootstrap.lost(rank))

    def _broken(self, text: str) -> None:
        self.status.fault(text)
        if self._control_tree is not None:
            self._control_tree.stop_waiting(self.status.reason)

    def _on_negotiating(self, serial: int, rank: int, header: Header, payload: bytes) -> None:
        self.sets.deliver(serial, rank, header, payload)
        self._close_if_caught_up()

    def _on_leaving(self, rank: int, why: str, rounds: Rounds) -> None:
        self._farewells.append((why, rounds, time.monotonic() + _FAREWELL_LIMIT_S))
        self._close_if_caught_up()

    def _close_if_caught_up(self) -> None:
        """End a world that another rank has left, once the rounds that it has executed have arrived.

        It may wait for this rank in one of them, and goodbyes take another path than the rounds of a set.
        """
        for why, rounds, deadline in self._farewells:
            if not self.sets.lacks(rounds) or time.monotonic() > deadline:
                self._farewells = []
                self.status.close(why)
                self._say_goodbye_if_idle()
                return

    def _on_tick(self) -> None:
        """Also look for stalls."""
        self._close_if_caught_up()
        for negotiation in self.sets.trees().values():
            negotiation.tick()
        for queue in self.sets.queues():
            queue.inspect()

    def line_of(self, rank: int) -> str:
        """Return the line that another rank's training thread is in, or why there is no answer."""
        tree = self._control_tree
        try:
            return "" if tree is None else tree.whereabouts(rank, -1, limit_s=_ASK_LIMIT_S).line
        except (OSError, EOFError) as error:
            return f"no answer: {error}"

    def absent(self, number: int, key: Key) -> dict[int, str]:
        """Return the other members of a set that do not wait for this, each with its current line."""
        tree, found = self._control_tree, dict[int, str]()
        ranks = [rank for rank in self.sets.ranks(number) if rank != self.world.rank]
        if tree is None:
            return {}

        def ask(rank: int) -> None:
            try:
                answer = tree.whereabouts(rank, self.sets.serial(number), limit_s=_ASK_LIMIT_S)
            except (OSError, EOFError, KeyError) as error:
                found[rank] = f"no answer: {error}"
            else:
                if key not in answer.keys:
                    found[rank] = answer.line

        threads = [threading.Thread(target=ask, args=(rank,), name="hora-ask", daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_ASK_LIMIT_S + 1.0)
        return dict(sorted(found.items()))


def _no_stream(rank: int) -> Stream:
    raise ValueError(f"there is no rank {rank} in a world of one")
