"""The runtime: this process's part of a running world, from `init` to `shutdown`.

It meets the other ranks, finds out who shares a host with whom, gives every process set its lane, and hands requests to
lanes. One runtime exists at a time; `hora.engine` keeps it. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hora.config import EngineConfig
from hora.engine.agreement import Agreement, LocalAgreement, MeshAgreement, ShmAgreement
from hora.engine.binding import Binding, reduce_at_gate
from hora.engine.fate import Fate
from hora.engine.gate import Gate
from hora.engine.lane import Lane
from hora.engine.mesh import Mesh, MeshEvents
from hora.engine.neighbours import Neighbours, check_ranks, check_ranks_at_init
from hora.engine.plan import Batch, Planner
from hora.engine.request import Kind, ReduceOp, Request, Signature, dtype_name
from hora.engine.segment import Segment
from hora.engine.stall import StallInspector
from hora.engine.transport.base import Transport
from hora.engine.transport.factory import make_transport
from hora.engine.transport.local import LocalTransport
from hora.errors import HorovodInternalError
from hora.events import Timeline
from hora.world import World

__all__ = ["Runtime"]

log = logging.getLogger("hora")

_GOODBYE_LIMIT_S = 2.0


class Runtime:
    """One initialised world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config
        self.timeline: Timeline | None = None
        self.fate = Fate()
        self._epoch = f"{world.generation}.{epoch}"
        self._handles: dict[int, tuple[Lane, Request]] = {}
        self._next_handle = itertools.count()
        self._sets: dict[int, tuple[int, ...]] = {}
        self._lanes: dict[int, Lane] = {}
        self._neighbours: Neighbours | None = None  # none in a world of one
        self._serials: dict[int, int] = {}
        self._num_registered = 0
        self._early_rounds: dict[int, list[list[tuple[int, bytes]]]] = {}
        self._rounds_lock = threading.Lock()
        self.pid = os.getpid()

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks and set up every process set. Blocks until all are there, within the limit."""
        size = self.world.size
        try:
            wanted = [sorted(ranks) for ranks in process_sets]
            if size > 1:
                self._neighbours = Neighbours(self.world, self.config, self._epoch, self._mesh_events())
                wanted = self._neighbours.meet(wanted)
            sets = [check_ranks_at_init(ranks, size) for ranks in wanted]
            with self._peers_may_go():
                self._register(0, tuple(range(size)))
                for index, ranks in enumerate(ranks for ranks in sets if len(ranks) < size):
                    self._register(index + 1, ranks)
                if self._neighbours is not None:
                    # A rank that went on and left again at once would take away what others are still fetching from it.
                    self._neighbours.gather("ready", b"1")
        except BaseException:
            self.close()
            raise
        if self.config.timeline and self.config.timeline.upper() != "DYNAMIC":
            self.start_timeline(self.config.timeline, self.config.timeline_mark_cycles)

    def _peers_may_go(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._neighbours is None else self._neighbours.peers_may_go()

    @property
    def _mesh(self) -> Mesh | None:
        return None if self._neighbours is None else self._neighbours.mesh

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks that proved to share memory."""
        return [[0]] if self._neighbours is None else self._neighbours.hosts

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
        lane = self._lane(process_set_id)
        if kind is Kind.ALLREDUCE and op == ReduceOp.ADASUM:
            self._check_adasum(process_set_id)
        if kind in (Kind.BARRIER, Kind.JOIN):
            # Reserved names, and numbered all the same: two barriers of two threads are two barriers.
            request = Request(Signature(int(kind), kind.name.lower(), None), (), None)
        else:
            request = lane.validator.request(
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
        handle = next(self._next_handle)
        self._handles[handle] = (lane, request)
        try:
            lane.submit(request, background=background)
        except BaseException:
            del self._handles[handle]
            raise
        return handle

    # Reductions of shared memory.

    def shared_memory(self, process_set_id: int, num_bytes: int) -> Segment | None:
        """The same zeroed memory for all members (collective); None where they share no host, or it is too little."""
        lane = self._lane(process_set_id)
        near = self._neighbours
        if near is None or len(lane.ranks) == 1 or not near.share_memory(lane.ranks):
            return None
        signature = Signature(int(Kind.REGION), "region", None, extra=(process_set_id, num_bytes))
        request = Request(signature, (), None)
        lane.submit(request, background=False)
        lane.wait(request)
        if request.error is not None:
            raise HorovodInternalError(*request.error.args)
        segment: Segment | None = request.result
        return segment

    def bind(
        self,
        kind: Kind,
        places: Sequence[Sequence[torch.Tensor]],
        *,
        name: str,
        out: torch.Tensor | None = None,
        op: int = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = 0,
        gate: Gate | None = None,
    ) -> Binding:
        """Prepare a reduction of shared memory for `submit_bound`: see `binding.py`.

        All members must have bound it before one submits it.
        """
        example = places[0][0]
        signature = Signature(
            int(kind),
            kind.name.lower(),
            name,
            (dtype_name(example.dtype),),
            ((example.numel(),),),
            int(op),
            float(prescale),
            float(postscale),
            extra=(1,),
        )
        binding = Binding(process_set_id, signature, places, out, gate)
        self._lane(process_set_id).bindings[name] = binding
        return binding

    def submit_bound(self, binding: Binding, *, background: bool = True) -> int:
        """Put a bound reduction in flight; returns its handle."""
        lane = self._lane(binding.process_set_id)
        mine = binding.places[binding.turn][lane.member]
        request = Request(binding.signature, (mine,), (mine if binding.out is None else binding.out,))
        handle = next(self._next_handle)
        lane.submit(request, background=background)
        self._handles[handle] = (lane, request)
        return handle

    def gate(self, segment: Segment, offset: int, *, name: str, process_set_id: int = 0) -> Gate:
        """A place to wait for the other members, on shared memory that all of them use for it (collective)."""
        lane, config = self._lane(process_set_id), self.config
        gate = Gate(
            segment,
            offset,
            member=lane.member,
            ranks=lane.ranks,
            name=name,
            guard=self._guard_at_gate,
            warning_s=0.0 if config.stall_check_disable else config.stall_warning_s,
            shutdown_s=config.stall_shutdown_s if config.stall_shutdown_s >= config.stall_warning_s else 0.0,
            stalled=self.stalled,
        )
        lane.gates.append(gate)
        return gate

    def _guard_at_gate(self) -> None:
        # Unlike an agreed operation, this one has not begun: after a goodbye the others will not come any more.
        self.fate.check_open()

    def reduce_at_gate(self, binding: Binding) -> torch.Tensor:
        """Carry out a bound reduction that is direct or scattered, in the calling thread, without agreement."""
        self.fate.check_open()
        lane, timeline = self._lane(binding.process_set_id), self.timeline
        if timeline is None:
            return reduce_at_gate(binding, lane.member, lane.ranks)
        operation = binding.kind.name
        names = [f"{operation.lower()}.{binding.signature.name}"]
        timeline.arrived(names, operation, lane.member)
        timeline.agreed(names)
        timeline.begin(names, operation)
        timeline.begin(names, f"SHM_{operation}")
        result = reduce_at_gate(binding, lane.member, lane.ranks)
        timeline.end(names)
        timeline.end(names, [{"dtype": binding.signature.dtypes[0], "shape": str(list(binding.signature.shapes[0]))}])
        return result

    def unbind(self, binding: Binding) -> None:
        """Forget a bound reduction; its memory goes with the last view of it."""
        lane = self._lanes.get(binding.process_set_id)
        if lane is not None and binding.signature.name is not None:
            lane.bindings.pop(binding.signature.name, None)
            if binding.gate is not None:
                self.drop_gate(binding.gate, binding.process_set_id)

    def drop_gate(self, gate: Gate, process_set_id: int) -> None:
        """Forget a gate."""
        lane = self._lanes.get(process_set_id)
        if lane is not None and gate in lane.gates:
            lane.gates.remove(gate)

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
        lane, request = entry
        if not request.done:
            lane.wait(request)
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
        gates = [gate for lane in self._lanes.values() for gate in lane.gates]
        for gate in gates:
            gate.leave()
        handles = [self.submit(Kind.JOIN, process_set_id=number) for number in sorted(self._lanes) if number]
        last = int(self.execute(Kind.JOIN))
        for handle in handles:
            self.synchronize(handle)
        for gate in gates:
            gate.come_back()
        self.barrier()  # nobody may pass a gate before all have come back to it
        return last

    # Process sets.

    def process_sets(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in sorted(self._sets.items())}

    def process_set_ranks(self, process_set_id: int) -> list[int]:
        ranks = self._sets.get(process_set_id)
        if ranks is None:
            raise ValueError(f"Process set {process_set_id} does not exist, or has not been registered")
        return list(ranks)

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks (collective); returns its number."""
        self._check_dynamic("add_process_set")
        wanted = check_ranks(ranks, self.world.size)
        for number, known in self._sets.items():
            if known == wanted:
                raise ValueError(f"a process set with the ranks {list(wanted)} exists already: number {number}")
        return int(self._control(Kind.ADD_PROCESS_SET, wanted))

    def remove_process_set(self, process_set_id: int) -> bool:
        """Remove a set on all ranks (collective). False for the global set and unknown ones."""
        self._check_dynamic("remove_process_set")
        if process_set_id == 0 or process_set_id not in self._sets:
            return False
        return bool(self._control(Kind.REMOVE_PROCESS_SET, (process_set_id,)))

    def control_batch(self, batch: Batch) -> Any:
        """Carry out an agreed change of process sets, on the driver's thread of the global lane."""
        values = batch.signature.extra
        if batch.kind is Kind.ADD_PROCESS_SET:
            number = next(candidate for candidate in itertools.count(1) if candidate not in self._sets)
            self._register(number, tuple(values))
            return number
        if batch.kind is Kind.REGION:
            return self._shared_segment(*values)
        (number,) = values
        self._sets.pop(number, None)
        lane = self._lanes.pop(number, None)
        if lane is not None:
            lane.close()
        return True

    def _control(self, kind: Kind, values: Sequence[int]) -> Any:
        lane = self._lane(0)
        request = Request(Signature(int(kind), kind.name.lower(), None, extra=tuple(values)), (), None)
        lane.submit(request, background=False)
        lane.wait(request)
        if request.error is not None:
            raise HorovodInternalError(*request.error.args)
        return request.result

    def _check_dynamic(self, what: str) -> None:
        if not self.config.dynamic_process_sets:
            raise ValueError(
                f"{what} needs dynamic process sets: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), "
                'or call hvd.init(process_sets="dynamic")'
            )
        self.fate.check_open()

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
        self.fate.close(text)
        for lane in list(self._lanes.values()):
            lane.drain()
        if self._mesh is not None:
            self._mesh.leave(text)
            if not self.fate.broken:
                self._mesh.wait_for_goodbyes(_GOODBYE_LIMIT_S)
        self.close()

    def close(self) -> None:
        """Release everything, without a word to the others."""
        self.fate.close("Horovod has been shut down")
        for lane in list(self._lanes.values()):
            lane.close()
        self._lanes.clear()
        self._handles.clear()
        if self._neighbours is not None:
            self._neighbours.mesh.close()
            self._neighbours = None
        self.stop_timeline()

    def settled(self) -> None:
        """Tell the rank that leaves that nothing more is needed of it."""
        mesh = self._mesh
        if (
            mesh is not None
            and self.world.rank not in mesh.goodbyes
            and not any(lane.num_in_flight for lane in self._lanes.values())
        ):
            mesh.leave(self.fate.reason)

    def stalled(self, ranks: Sequence[int], text: str) -> None:
        """End the job for everybody because these ranks keep the others waiting."""
        self._broken(f"rank(s) {', '.join(map(str, ranks))} {text}; Horovod has been shut down", tell=True)

    def failed(self, text: str) -> None:
        """End the job for everybody because this rank could not carry out what was agreed."""
        self._broken(f"a collective failed on rank {self.world.rank}: {text}; Horovod has been shut down", tell=True)

    def lost(self, rank: int, how: str) -> None:
        """The launcher tells that a rank is gone."""
        mesh = self._mesh
        if rank != self.world.rank and mesh is not None and rank not in mesh.goodbyes:
            self._broken(f"rank {rank} {how}. Horovod has been shut down")
            mesh.stop_waiting(self.fate.reason)

    def _broken(self, text: str, *, tell: bool = False) -> None:
        self.fate.fault(text)
        if tell and self._mesh is not None:
            self._mesh.report_fault(self.world.rank, text)
        for lane in list(self._lanes.values()):
            lane.agreement.wake()

    # What the mesh reports, on its thread.

    def _mesh_events(self) -> MeshEvents:
        return MeshEvents(
            lost=self._on_lost,
            leaving=self._on_leaving,
            fault=self._on_fault,
            announced=self._on_round,
            tick=self._on_tick,
        )

    def _on_lost(self, rank: int) -> None:
        assert self._neighbours is not None
        self._broken(
            f"{self._neighbours.describe(rank)} was lost: its connection ended without a goodbye. "
            "It was killed, crashed, or its host is unreachable. Horovod has been shut down"
        )

    def _on_leaving(self, rank: int, why: str) -> None:
        self.fate.close(why)
        for lane in list(self._lanes.values()):
            lane.agreement.wake()
        self.settled()

    def _on_fault(self, rank: int, text: str) -> None:
        self._broken(text)

    def _on_round(self, process_set_id: int, parts: list[tuple[int, bytes]]) -> None:
        with self._rounds_lock:
            self._deliver(process_set_id, parts)

    def _deliver(self, process_set_id: int, parts: list[tuple[int, bytes]]) -> None:
        lane = self._lanes.get(process_set_id)
        if lane is not None and isinstance(lane.agreement, MeshAgreement):
            lane.agreement.deliver(parts)
        elif process_set_id not in self._sets:
            self._early_rounds.setdefault(process_set_id, []).append(parts)

    def _on_tick(self) -> None:
        for lane in list(self._lanes.values()):
            lane.inspect()

    def _lane(self, process_set_id: int) -> Lane:
        lane = self._lanes.get(process_set_id)
        if lane is None:
            ranks = self.process_set_ranks(process_set_id)
            raise ValueError(
                f"Rank {self.world.rank} is not a member of the provided process set {process_set_id}, "
                f"which has the ranks {ranks}"
            )
        return lane

    def _register(self, number: int, ranks: tuple[int, ...]) -> None:
        self._num_registered += 1  # on every rank, whether a member or not
        self._serials[number] = self._num_registered
        lane = self._make_lane(number, ranks) if self.world.rank in ranks else None
        with self._rounds_lock:  # the mesh thread must neither drop a round now nor deliver one before the early ones
            if lane is not None:
                self._lanes[number] = lane
            self._sets[number] = ranks
            for parts in self._early_rounds.pop(number, []):
                self._deliver(number, parts)

    def _make_lane(self, number: int, ranks: tuple[int, ...]) -> Lane:
        member = ranks.index(self.world.rank)
        planner = Planner(
            ranks,
            fusion_threshold_bytes=self._setting("fusion_threshold_bytes"),
            group_fusion=not self._setting("disable_group_fusion"),
        )
        stall = None
        if member == 0 and len(ranks) > 1 and not self.config.stall_check_disable:
            stall = StallInspector(
                ranks, warning_s=self.config.stall_warning_s, shutdown_s=self.config.stall_shutdown_s
            )
            if stall.refused_shutdown_s and number == 0:
                log.warning(
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is below HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                    stall.refused_shutdown_s,
                    self.config.stall_warning_s,
                )
        return Lane(
            number,
            ranks,
            member,
            agreement=self._make_agreement(number, ranks, member),
            planner=planner,
            stall=stall,
            fate=self.fate,
            host=self,
            core=self._core(),
        )

    def _setting(self, name: str) -> Any:
        """A setting that all ranks must share."""
        return getattr(self.config, name) if self._neighbours is None else self._neighbours.setting(name)

    def _core(self) -> int | None:
        cores, local_rank = self.config.thread_affinity, self.world.local_rank
        if not cores:
            return None
        if local_rank >= len(cores) or cores[local_rank] not in os.sched_getaffinity(0):
            raise ValueError(
                f"HOROVOD_THREAD_AFFINITY must name a core of {sorted(os.sched_getaffinity(0))} for every local rank, "
                f"but it is {','.join(map(str, cores))} and this is local rank {local_rank}"
            )
        return cores[local_rank]

    def _make_agreement(self, number: int, ranks: tuple[int, ...], member: int) -> Agreement:
        if len(ranks) == 1:
            return LocalAgreement()
        neighbours, capacity = self._neighbours, self.config.cache_capacity
        assert neighbours is not None
        if neighbours.share_memory(ranks):
            num_bytes = ShmAgreement.num_bytes(len(ranks))
            segment = neighbours.share(f"{self._label(number)}/control", ranks, num_bytes)
            return ShmAgreement(segment, member, len(ranks), cache_capacity=capacity)
        send = functools.partial(neighbours.mesh.announce, number, member)
        return MeshAgreement(send, len(ranks), cache_capacity=capacity)

    def _shared_segment(self, process_set_id: int, num_bytes: int) -> Segment | None:
        assert self._neighbours is not None
        ranks = self._sets[process_set_id]
        return self._neighbours.share_or_none(f"{self._label(process_set_id)}/region", ranks, num_bytes)

    def _label(self, process_set_id: int) -> str:
        """Names a set for good: numbers are used again, and what an earlier set left behind must not be found."""
        return f"set{process_set_id}.{self._serials[process_set_id]}"

    def transport(self, lane: Lane, device: str) -> Transport:
        """Make the transport of a lane for a device type (collective among its members)."""
        if self._neighbours is None or len(lane.ranks) == 1:
            return LocalTransport()
        label = self._label(lane.process_set_id)
        near = self._neighbours.neighbourhood(label, device, lane.ranks, self.fate.guard)
        return make_transport(near, device, lane.transport)
