"""The runtime: this process's part of a running world, from `init` to `shutdown`.

It meets the other ranks, finds out who shares a host with whom, gives every process set its lane, and hands requests to
lanes. One runtime exists at a time; `hora.engine` keeps it. States:

    absent --init--> up --shutdown, here or on any rank--> closing --close--> absent
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hora.config import EngineConfig
from hora.engine import futex
from hora.engine.agreement import Agreement, LocalAgreement, MeshAgreement, ShmAgreement
from hora.engine.binding import Binding, reduce_at_gate
from hora.engine.bootstrap import Gathering, host_fingerprint, local_address, open_gathering
from hora.engine.fate import Fate
from hora.engine.gate import Gate
from hora.engine.lane import Lane
from hora.engine.mesh import Mesh, MeshEvents, same_host_groups
from hora.engine.plan import Batch, Planner
from hora.engine.request import Kind, ReduceOp, Request, Signature, dtype_name
from hora.engine.segment import Segment
from hora.engine.stall import StallInspector
from hora.engine.transport.base import Transport
from hora.engine.transport.factory import Neighbourhood, make_transport
from hora.errors import HorovodInternalError
from hora.events import Timeline
from hora.world import World

__all__ = ["Runtime"]

log = logging.getLogger("hora")

_PROBE_LIMIT_S = 10.0
_GOODBYE_LIMIT_S = 2.0


@dataclass(frozen=True)
class _Facts:
    """What a rank tells the others when they meet."""

    rank: int
    mesh_name: str
    fingerprint: str
    pid: int
    hostname: str
    process_sets: list[list[int]]
    secret: str
    config: dict[str, Any]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Facts:
        return cls(**json.loads(data))


class Runtime:
    """One initialised world, after `start`."""

    def __init__(self, world: World, config: EngineConfig, epoch: int) -> None:
        self.world = world
        self.config = config
        self.timeline: Timeline | None = None
        self.fate = Fate()
        self.hosts: list[list[int]] = [[0]]  # ranks that proved to share memory
        self._epoch = f"{world.generation}.{epoch}"
        self._handles: dict[int, tuple[Lane, Request]] = {}
        self._next_handle = itertools.count()
        self._sets: dict[int, tuple[int, ...]] = {}
        self._lanes: dict[int, Lane] = {}
        self._mesh: Mesh | None = None
        self._gathering: Gathering | None = None
        self._peers: list[_Facts] = []
        self._serials: dict[int, int] = {}
        self._num_registered = 0
        self._early_rounds: dict[int, list[list[tuple[int, bytes]]]] = {}
        self._rounds_lock = threading.Lock()
        self._num_segments: dict[str, int] = {}
        self.pid = os.getpid()

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks and set up every process set. Blocks until all are there, within the limit."""
        size = self.world.size
        try:
            self._meet([sorted(ranks) for ranks in process_sets])
            sets = [_checked(ranks, size) for ranks in process_sets]
            with self._peers_may_go():
                self._register(0, tuple(range(size)))
                for index, ranks in enumerate(ranks for ranks in sets if len(ranks) < size):
                    self._register(index + 1, ranks)
                if size > 1:
                    # A rank that went on and left again at once would take away what others are still fetching from it.
                    self._gather("ready", b"1")
        except BaseException:
            self.close()
            raise
        if self.config.timeline and self.config.timeline.upper() != "DYNAMIC":
            self.start_timeline(self.config.timeline, self.config.timeline_mark_cycles)

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
        if len(lane.ranks) == 1 or not self._shares_memory(lane.ranks):
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
            return self._share_or_none(*values)
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
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
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

    # Setting up.

    def _meet(self, process_sets: list[list[int]]) -> None:
        world = self.world
        if world.size == 1:
            return
        self._gathering = open_gathering(world, limit_s=self.config.init_timeout_s)
        self._mesh = mesh = Mesh(world.rank, world.size, self._mesh_events())
        secret = secrets.token_hex(32) if world.rank == 0 else ""
        shared = {
            name: getattr(self.config, name) for name in ("fusion_threshold_bytes", "disable_group_fusion", "transport")
        }
        mine = _Facts(world.rank, mesh.name, host_fingerprint(), self.pid, world.hostname, process_sets, secret, shared)
        self._peers = [_Facts.decode(data) for data in self._gather("facts", mine.encode())]
        self._check_agreement_on_sets()
        mesh.start(bytes.fromhex(self._peers[0].secret))
        self.hosts = self._prove_hosts()
        with self._peers_may_go():
            self._join_mesh()

    @contextlib.contextmanager
    def _peers_may_go(self) -> Iterator[None]:
        """What a peer's sudden end does to its connections is a lost rank, not a problem of this one."""
        try:
            yield
        except OSError as error:
            raise HorovodInternalError(f"rank {self.world.rank} could not meet the others: {error}") from error

    def _check_agreement_on_sets(self) -> None:
        expected = self._peers[0].process_sets
        for peer in self._peers:
            if peer.process_sets != expected:
                raise ValueError(
                    "Horovod initialization failed: the ranks disagree on their process sets: rank 0 has "
                    f"{expected}, rank {peer.rank} has {peer.process_sets}"
                )
        # Only now: a rank that refused its sets alone, before the meeting, would keep the others waiting.
        for ranks in expected:
            _checked(ranks, self.world.size)

    def _gather(self, what: str, value: bytes) -> list[bytes]:
        assert self._gathering is not None
        world = self.world
        return self._gathering.allgather(
            f"{self._epoch}/{what}",
            value,
            rank=world.rank,
            size=world.size,
            limit_s=self.config.init_timeout_s,
        )

    def _prove_hosts(self) -> list[list[int]]:
        """Groups of ranks that really share memory: every other rank fetched the first one's."""
        assert self._mesh is not None
        (group,) = [g for g in same_host_groups([p.fingerprint for p in self._peers]) if self.world.rank in g]
        leader = group[0]
        proven = leader == self.world.rank
        if proven:
            self._mesh.offer("probe", 1, len(group) - 1)
        else:
            try:
                self._mesh.fetch(self._peers[leader].mesh_name, "probe", limit_s=_PROBE_LIMIT_S).close()
                proven = True
            except OSError as error:
                log.warning("rank %d cannot share memory with rank %d: %s", self.world.rank, leader, error)
        answers = self._gather("hosts", json.dumps([leader if proven else self.world.rank]).encode())
        return same_host_groups([json.loads(answer)[0] for answer in answers])

    def _join_mesh(self) -> None:
        mesh, world = self._mesh, self.world
        assert mesh is not None
        near = self.hosts[0]
        where: list[Any] = ["", 0]
        if len(self.hosts) > 1:
            address = local_address(world.meeting.address, self.config.interface)
            mine = [address, mesh.listen_tcp(address) if world.rank == 0 else 0]
            where = json.loads(self._gather("hub", json.dumps(mine).encode())[0])
        if world.rank == 0:
            mesh.wait_for_all(limit_s=self.config.init_timeout_s)
        elif world.rank in near:
            mesh.join_hub(self._peers[0].mesh_name, limit_s=self.config.init_timeout_s)
        else:
            mesh.join_hub((str(where[0]), int(where[1])), limit_s=self.config.init_timeout_s)

    def _mesh_events(self) -> MeshEvents:
        return MeshEvents(
            lost=self._on_lost,
            leaving=self._on_leaving,
            fault=self._on_fault,
            announced=self._on_round,
            tick=self._on_tick,
        )

    def _on_lost(self, rank: int) -> None:
        peer = self._peers[rank]
        self._broken(
            f"rank {rank} (process {peer.pid} on {peer.hostname}) was lost: its connection ended without a goodbye. "
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
        shared = self._peers[0].config if self._peers else asdict(self.config)
        planner = Planner(
            ranks,
            fusion_threshold_bytes=shared["fusion_threshold_bytes"],
            group_fusion=not shared["disable_group_fusion"],
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
        mesh = self._mesh
        assert mesh is not None
        if self._shares_memory(ranks):
            segment = self._share(f"{self._label(number)}/control", ranks, ShmAgreement.num_bytes(len(ranks)))
            return ShmAgreement(segment, member, len(ranks), cache_capacity=self.config.cache_capacity)
        return MeshAgreement(
            lambda data: mesh.announce(number, member, data),
            len(ranks),
            cache_capacity=self.config.cache_capacity,
        )

    def _shares_memory(self, ranks: Sequence[int]) -> bool:
        kind = self._peers[0].config["transport"]
        return kind != "gloo" and futex.supported() and any(set(ranks) <= set(host) for host in self.hosts)

    def _label(self, process_set_id: int) -> str:
        """Names a set for good: numbers are used again, and what an earlier set left behind must not be found."""
        return f"set{process_set_id}.{self._serials[process_set_id]}"

    def _share(self, key: str, ranks: Sequence[int], num_bytes: int) -> Segment:
        """The same new memory for all these ranks, which are on one host (collective)."""
        assert self._mesh is not None
        number = self._num_segments[key] = self._num_segments.get(key, 0) + 1
        key = f"{key}/{number}"
        if ranks[0] == self.world.rank:
            return self._mesh.offer(key, num_bytes, len(ranks) - 1)
        return self._mesh.fetch(self._peers[ranks[0]].mesh_name, key, limit_s=self.config.init_timeout_s)

    def _share_or_none(self, process_set_id: int, num_bytes: int) -> Segment | None:
        key, ranks = f"{self._label(process_set_id)}/region", self._sets[process_set_id]
        try:
            segment = self._share(key, ranks, num_bytes)
        except MemoryError as error:
            log.warning("%s; going on without sharing it", error)
            self._num_segments[key] -= 1
            segment = self._share(key, ranks, 1)  # the others wait for a segment: its size tells them
        return segment if segment.num_bytes >= num_bytes else None

    def transport(self, lane: Lane, device: str) -> Transport:
        """Make the transport of a lane for a device type (collective among its members)."""
        gathering = self._gathering
        label = self._label(lane.process_set_id)
        prefix = f"{self._epoch}/{label}/{device}"
        neighbourhood = Neighbourhood(
            ranks=lane.ranks,
            member=lane.member,
            hosts=self.hosts
            if self._peers and self._peers[0].config["transport"] != "gloo" and futex.supported()
            else [[r] for r in lane.ranks],
            share=lambda ranks, num_bytes: self._share(f"{label}/{device}", ranks, num_bytes),
            store=lambda name: (
                gathering.store(f"{prefix}/{name}", limit_s=self.config.init_timeout_s, guard=self.fate.guard)
                if gathering
                else None
            ),
            address=local_address(self.world.meeting.address, self.config.interface) if len(lane.ranks) > 1 else "",
            guard=self.fate.guard,
        )
        return make_transport(neighbourhood, device, lane.transport)


def _checked(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    try:
        return check_ranks(ranks, size)
    except ValueError as error:
        raise ValueError(f"Horovod initialization failed: {error}") from None


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set, sorted. ValueError for what is no set of ranks of this world."""
    values = sorted(ranks)
    if not values:
        raise ValueError("a process set needs at least one rank")
    if len(set(values)) != len(values):
        raise ValueError(f"a process set must not name a rank twice: {values}")
    if values[0] < 0 or values[-1] >= size:
        raise ValueError(f"a process set of this world may hold the ranks 0..{size - 1}, but it was given {values}")
    return tuple(values)
