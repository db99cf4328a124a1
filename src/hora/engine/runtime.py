"""The runtime: this process's part of a running world, from `init` to `shutdown`.

`Runtime` connects to the other ranks (`bootstrap`), submits operations, and passes the control tree's reports to the
world's status (`status`). One runtime exists at a time; `process` keeps it. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent

Each of its process sets has a queue (`process_sets`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

import torch

from hora.config import EngineConfig
from hora.engine import standstill
from hora.engine.bootstrap import Bootstrap
from hora.engine.control_tree import ControlEvents, ControlTree
from hora.engine.point_to_point import Messages
from hora.engine.process_sets import ProcessSets, checked_ranks, request_without_tensors
from hora.engine.request import CollectiveCall, Key, Kind, Reduce, ReduceOp, Request
from hora.engine.schedule import ReductionSchedule
from hora.engine.status import StallLimits, TimelineRecorder, WorldStatus
from hora.net.wire import Header, Stream, derived_secret, new_secret
from hora.telemetry.meters import meter
from hora.world import World

log = logging.getLogger("hora")

_GOODBYE_LIMIT_S = 2.0
_SUM = Reduce()


class Runtime:
    """One initialized world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config  # `start` replaces the common values with rank 0's
        self.num_joins = 0
        self.used_by_hvd = False  # not only by a process group, which then leaves it running
        self.is_current = True  # `process` has no other, and this process started it
        self.recorder = TimelineRecorder(world.rank)
        self.status = WorldStatus(world.rank, tell=self._report_fault, wake=self._wake)
        self.sets = ProcessSets(self)
        self._epoch = f"{world.generation}.{epoch}"
        self._bootstrap: Bootstrap | None = None  # None in a world of one
        self._solo_secret = new_secret()  # of a world of one
        self._messages: Messages | None = None
        self._looking = threading.Lock()
        self._standstill = standstill.StandstillWatch(self.sets.queues_by_serial, self._query_ranks)

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
                    negotiating=self.sets.deliver,
                    whereabouts=self.sets.whereabouts,
                    standstill=lambda question: standstill.answer(self.sets.queues_by_serial(), question),
                    tick=self._on_tick,
                )
                self._bootstrap = Bootstrap(self.world, self.config, self._epoch, events, self.status.check_alive)
                wanted = self._bootstrap.meet(wanted)
                self.config = self._bootstrap.config
                self._check_stall_limits()
            try:
                sets = [checked_ranks(ranks, size) for ranks in wanted]  # the same on all ranks
            except ValueError as error:
                raise ValueError(f"Horovod initialization failed: {error}") from None
            with contextlib.nullcontext() if self._bootstrap is None else self._bootstrap.peers_may_go():
                for ranks in (tuple(range(size)), *(ranks for ranks in sets if len(ranks) < size)):
                    self.sets.register(ranks)
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

    def _check_stall_limits(self) -> None:
        config = self.config
        limits = StallLimits.of(config) if self.world.rank == 0 else None
        if limits is not None and limits.shutdown_s < config.stall_shutdown_s:
            log.warning(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is below HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                config.stall_shutdown_s,
                config.stall_warning_s,
            )

    @property
    def peers(self) -> Bootstrap:
        """The other ranks of a world of several."""
        assert self._bootstrap is not None
        return self._bootstrap

    @property
    def _control_tree(self) -> ControlTree | None:
        bootstrap = self._bootstrap  # read once: `close` removes it, on another thread
        return None if bootstrap is None else bootstrap.control_tree

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks that proved to share memory."""
        return [[0]] if self._bootstrap is None else self._bootstrap.hosts

    @property
    def workers(self) -> list[int]:
        """The number of each rank's process in its job, which stays when ranks change."""
        return [self.world.number] if self._bootstrap is None else self._bootstrap.workers

    def gather(self, what: str, value: bytes) -> list[bytes]:
        """Return every rank's value, in rank order (collective). `what` names it, once in a world."""
        return [value] if self._bootstrap is None else self._bootstrap.gather(what, value)

    @property
    def sharing(self) -> list[list[int]]:
        """The hosts between which data uses a network; a rank that may not share memory counts as one."""
        return [[0]] if self._bootstrap is None else self._bootstrap.sharing

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
    ) -> Request:
        """Put an operation in flight. With `background=False` only the thread that waits for its result drives it.

        `residuals`: the encoding error of each tensor, if `Reduce.code` keeps it. Only if a set `spans_hosts`.
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
        queue.submit(request, background=background)
        return request

    def allreduce_(self, tensor: torch.Tensor, name: str, reduce: Reduce = _SUM, set_id: int = 0) -> torch.Tensor:
        """Reduce a tensor in place over a process set, and wait for it."""
        both, kind = [tensor], Kind.ALLREDUCE
        self.submit(
            kind, both, outputs=both, name=name, reduce=reduce, process_set_id=set_id, background=False
        ).result()
        return tensor

    def barrier(self, process_set_id: int = 0) -> None:
        """Wait until every member has called."""
        self.submit(Kind.BARRIER, process_set_id=process_set_id, background=False).result()

    def join(self) -> int:
        """Take no further part until every rank has joined; returns the rank that joined last."""
        self.num_joins += 1
        # In every set: its other members would wait for this rank.
        queues = self.sets.queues()
        if torch.cuda.is_initialized():
            for queue in queues:  # the driving thread may have another current GPU
                queue.validator.set_home_gpu(torch.device("cuda", torch.cuda.current_device()))
        schedules: list[ReductionSchedule] = [schedule for queue in queues for schedule in queue.schedules]
        for schedule in schedules:
            schedule.leave()
        for schedule in schedules:
            schedule.finish_leaving()
        requests = [(queue, request_without_tensors(Kind.JOIN)) for queue in queues]
        for queue, request in requests:
            # This thread waits for the world, and drives it meanwhile.
            queue.submit(request, background=queue.process_set_id != 0)
        for _, request in requests:
            request.result()
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
        if self._messages is None:
            near, segment, ways, bootstrap = [0], None, (_no_stream, _no_stream), self._bootstrap
            if bootstrap is not None:
                near = bootstrap.beside(range(self.world.size))
                ways = bootstrap.open_sealed_stream, bootstrap.accept_sealed_stream
            if bootstrap is not None and len(near) > 1:
                segment = bootstrap.share("messages", near, Messages.num_bytes(len(near)))
            self._messages = Messages(self.world.rank, near, segment, self.status, self.sets.status, *ways)
        return self._messages

    # The end.

    def shutdown(self, *, behind: bool = False) -> None:
        """Leave the world, which ends it for every rank; agreed operations are still executed.

        `behind`: this process continues in another world, and connections are closed meanwhile.
        """
        text = f"Horovod has been shut down by rank {self.world.rank}"
        if meter.num_steps:  # the others may be in the middle of a later one
            text += f", which has made {meter.num_steps} steps"
        self.status.close(text, by=self.world.rank)
        for queue in self.sets.queues():
            queue.drain()
            queue.wait_for_gpu()
        if self._control_tree is not None:
            # This may be the first report to the others: then no rank waits for goodbyes. A death reaches them anyway.
            if self.status.broken and not self.status.has_lost:
                self._report_fault(self.status.reason)
            why = f"{text}: {self.status.reason}" if self.status.has_lost else self.status.reason
            self._control_tree.leave(why if self.status.broken else text)
            if not self.status.broken:
                self._control_tree.wait_for_goodbyes(_GOODBYE_LIMIT_S)
        self.close(behind=behind)

    def close(self, *, behind: bool = False) -> None:
        """Release everything without notifying the others."""
        self.status.close("Horovod has been shut down")
        self.sets.close()
        if self._messages is not None:
            self._messages.close(self.status.reason)
        if self._bootstrap is not None:
            control_tree, self._bootstrap = self._bootstrap.control_tree, None
            if behind:
                threading.Thread(target=control_tree.close, name="hora-control-close", daemon=True).start()
            else:
                control_tree.close()
        self.recorder.stop()

    def lost(self, rank: int, how: str) -> None:
        """Handle the launcher's report that a rank is gone."""
        control_tree, text = self._control_tree, f"rank {rank} {how}. Horovod has been shut down"
        if rank != self.world.rank and control_tree is not None and rank not in control_tree.goodbyes:
            self._broken(text, rank)
            control_tree.expect_nothing_of(rank)
        self.status.gone(rank, text)

    def _report_fault(self, text: str) -> None:
        control_tree = self._control_tree
        if control_tree is not None:
            control_tree.report_fault(self.world.rank, text)

    def _wake(self) -> None:
        """Wake the threads that wait for other members, so that they recheck the world's status."""
        for queue in self.sets.queues():
            queue.interrupt()
        if self._messages is not None:
            self._messages.interrupt()

    def leave_if_idle(self) -> None:
        """Tell the leaving rank that it is no longer needed."""
        control_tree = self._control_tree
        if not self.status.closing:  # only a group ends
            return
        ending = [queue for queue in self.sets.queues() if not queue.status.is_open]  # the others outlive the world
        if control_tree is not None and not any(queue.num_in_flight for queue in ending):
            control_tree.leave(self.status.reason)

    # What the control tree reports, on its thread.

    def _broken(self, text: str, lost: int | None = None) -> None:
        control_tree = self._control_tree
        self.status.fault(text, lost=lost)
        if control_tree is not None:
            control_tree.stop_waiting(self.status.reason)

    def _on_lost(self, rank: int) -> None:
        bootstrap = self._bootstrap  # None: this rank has closed its world, and the control tree is about to stop
        if bootstrap is not None:
            self._broken(bootstrap.lost(rank), rank)

    def _on_leaving(self, rank: int, why: str) -> None:
        self.status.close(why, by=rank)
        self.leave_if_idle()

    def _on_tick(self) -> None:
        """Look for stalls."""
        for negotiation in self.sets.trees().values():
            negotiation.tick()
        for queue in self.sets.queues():
            queue.inspect()
        if self.world.rank == 0 and not self.config.stall_check_disable:
            self._standstill.look()
        self._look_for_members()

    def _look_for_members(self) -> None:
        """Look whether the members of groups that outlive the world are still there: of the first rank that leaves
        there is news, of those after it there is none.
        """
        wanted = {rank for group in self.status.living_groups() for rank in group.ranks if rank != self.world.rank}
        if not wanted or self._looking.locked():
            return

        def look() -> None:
            with self._looking, contextlib.suppress(RuntimeError):
                for rank in sorted(wanted):
                    tree = self._control_tree
                    if tree is not None and not tree.is_there(rank):
                        self.status.gone(rank, f"rank {rank} has left, or has ended")

        threading.Thread(target=look, name="hora-look-for-members", daemon=True).start()

    def _query_ranks(self, ranks: Sequence[int], question: Header) -> dict[int, bytes]:
        """Return the answers of the ranks that give one."""
        tree = self._control_tree
        answers = {} if tree is None else tree.request(ranks, question)
        return {rank: found for rank, found in answers.items() if isinstance(found, bytes)}

    def lines_of(self, ranks: Sequence[int], number: int = 0, key: Key | None = None) -> dict[int, str]:
        """Return the line that each of these ranks' training threads is in, or why there is no answer; with a key, only
        of the ranks that do not wait for it in this set.
        """
        tree = self._control_tree
        answers = {} if tree is None else tree.whereabouts(ranks, self.sets.serial(number))
        return {rank: answer.line for rank, answer in sorted(answers.items()) if key not in answer.keys}


def _no_stream(rank: int, key: str) -> Stream:
    raise ValueError(f"there is no rank {rank} in a world of one")
