"""Allreduce between hosts by the native part (`hosts.h`): its parameters and its memory.

Staged data goes through the host's memory piece by piece; resident data, which is there already, is reduced in place.
`HierarchicalTransport` defines the computation.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from hora.engine.request import Kind
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, SLICE_NS, wait_until
from hora.engine.shm.native import NOTHING, Sum, addresses, described, native_part, new_spin_policy
from hora.engine.shm.segment import Segment, aligned
from hora.engine.transport.base import AliveCheck, Tensors
from hora.engine.transport.packing import total
from hora.engine.transport.stream import StreamGroup
from hora.errors import AuthenticationError

# Half of a message between two hosts stays in the first-level cache while it is combined, encrypted and sent; with more
# hosts, each of which sends to all, fewer and longer messages take less time.
_PAIR_MESSAGE_BYTES = 64 * 2**10
_MESSAGE_BYTES = 128 * 2**10
_LONGEST_SLICE_BYTES = 512 * 2**10
# Up to this size a host sends all its data to all others, in one step instead of two.
_ONE_STEP_BYTES = 64 * 2**10
# The number of pieces in flight between the hosts.
_WINDOW = 4
_RESIDENT_WINDOW = 16
_NUM_INPUTS, _NUM_RINGS, HEADER_BYTES = 4, 3, 32  # of hosts.h
_NUM_RESULTS = 2 * _WINDOW + 3
_NUM_ROOMS = _RESIDENT_WINDOW + 3
_ON_THE_WAY, _AT_ONCE, _VOID = 1, 2, 2  # `enum check` and `enum outcome` of hosts.h
# An encoded part may be a little longer than its numbers.
_SPARE_BYTES = 16
_KINDS = {Kind.ALLREDUCE: 0, Kind.REDUCESCATTER: 1, Kind.ALLGATHER: 2}  # `enum kind` of hosts.h
_CODE_NUMBERS = {"": 0, "fp16": 1, "bf16": 2, "int8": 3}


def cut_for(count: int, itemsize: int, num_slices: int, num_hosts: int) -> tuple[int, bool]:
    """Return how many elements make a slice, and whether it is sent in two steps. A piece has `num_slices` slices.

    The cut is the same on all members, with and without the native part: blocks of an encoding begin with a slice, or
    with a host's part of one.
    """
    num_pieces = max(-(-count * itemsize // (_longest(num_hosts) * num_slices)), 1)
    most = max(-(-count // (num_pieces * num_slices)), 1)
    return most, (num_hosts > 2 and most * itemsize * (num_hosts - 1) > _ONE_STEP_BYTES)


def _longest(num_hosts: int) -> int:
    """Return the bytes of the longest slice."""
    return _PAIR_MESSAGE_BYTES if num_hosts == 2 else min(_MESSAGE_BYTES * num_hosts, _LONGEST_SLICE_BYTES)


class Scaling(NamedTuple):
    """Arithmetic of an allreduce between hosts: `stage`, then the sums inside a host and between hosts, then `last`."""

    stage: float
    inside: Sum
    between: Sum
    last: Sum
    weights: tuple[float, ...]  # of the hosts, in an average of half precision
    code: str  # the encoding in which they are sent


@described("stream")
class _Stream(ctypes.Structure):
    """A connection and the messages that are queued for it."""


@described("hosts")
class _Hosts(ctypes.Structure):
    """The member's position, and the memory and streams that it uses."""


@described("hosts_job")
class _Job(ctypes.Structure):
    """An allreduce, or half of one, and its progress."""


class NativeHosts:
    """The allreduces of member number `index` of host number `host`, one after the other. `hosts`: each host's members.

    `share` allocates zeroed memory for all members of this host (collective); `group` connects slice leader number
    `index` with those of the other hosts, None for a member that is no slice leader.
    """

    def __init__(
        self,
        share: Callable[[int], Segment],
        group: StreamGroup | None,
        hosts: Sequence[Sequence[int]],
        host: int,
        index: int,
        check_alive: AliveCheck,
    ) -> None:
        self._share, self._group, self._check_alive = share, group, check_alive
        num_local, num_leaders, num_hosts = len(hosts[host]), min(map(len, hosts)), len(hosts)
        self._num_leaders, self._num_hosts = num_leaders, num_hosts
        self._run_some = native_part().between_hosts
        slice_room = aligned(_longest(num_hosts) + num_hosts * _SPARE_BYTES, 2 * LINE_BYTES)
        self._hosts = _Hosts(
            counter_bytes=MEMBER_BYTES,
            slice_room=slice_room,
            piece_room=num_leaders * slice_room,
            inputs_at=aligned(2 * MEMBER_BYTES * num_local),
            member=index,
            num_local=num_local,
            num_leaders=num_leaders,
            host=host,
            num_hosts=num_hosts,
            num_results=_NUM_RESULTS,
            num_rooms=_NUM_ROOMS,
            patience=new_spin_policy(num_local),
        )
        self._hosts.results_at = self._hosts.inputs_at + num_local * _NUM_INPUTS * self._hosts.piece_room
        self._segment: Segment | None = None
        self._room: torch.Tensor | None = None
        self._streams = (_Stream * num_hosts)(), (_Stream * num_hosts)()
        if group is not None:
            # Untouched memory is not allocated.
            room_bytes = (_NUM_RINGS * _NUM_ROOMS + 2 * num_hosts + 1) * slice_room
            num_bytes = room_bytes + num_hosts * HEADER_BYTES + LINE_BYTES
            self._room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._hosts.room = aligned(self._room.data_ptr(), LINE_BYTES)
            self._hosts.headers = self._hosts.room + room_bytes
            self._hosts.outgoing, self._hosts.incoming = (
                ctypes.cast(each, ctypes.POINTER(_Stream)) for each in self._streams
            )
        self._next = 0
        self.late_host: int | None = None  # during a liveness check: the host that is waited for

    def allreduce(self, inputs: Tensors, outputs: Tensors, numbers: Scaling, residuals: Tensors = ()) -> None:
        """Reduce several private tensors as one. `outputs[i]` may be `inputs[i]`; `residuals`: of the code, or none."""
        if self._segment is None:
            self._segment = self._share(self._hosts.results_at + _NUM_RESULTS * self._hosts.piece_room)
            self._hosts.memory = self._segment.tensor(0, 1, torch.uint8).data_ptr()
        count, itemsize = total(inputs), inputs[0].itemsize
        cut = cut_for(count, itemsize, self._num_leaders, self._num_hosts)
        num_pieces = -(-count // (cut[0] * self._num_leaders))
        starts = [0, *accumulate(tensor.numel() for tensor in inputs)]
        staged = {"end": count, "first": self._next, "num_pieces": num_pieces, "window": _WINDOW}
        self._run(numbers, cut, inputs, outputs, residuals, starts, staged)
        self._next += num_pieces

    def reduce_resident(
        self,
        kind: Kind,
        places: Tensors,
        spans: Sequence[range],
        owners: range,
        numbers: Scaling,
        residual: torch.Tensor | None,
        header: bytes,
    ) -> bool:
        """Run an allreduce, a reducescatter or an allgather of data in the memory of this host's members.

        `spans`: this slice leader's elements, which no one else touches meanwhile; in half an allreduce, its part of
        each host's elements. `owners`: the elements that the first member of this host owns; the others own as many.

        Returns False if the hosts have different headers: then nothing was changed, and the streams are unusable.
        """
        itemsize, whole = places[0].itemsize, spans[0]
        cut = max(_longest(self._num_hosts) // (self._num_hosts * itemsize), 1), False
        if kind is Kind.ALLREDUCE:
            cut = cut_for(len(whole), itemsize, 1, self._num_hosts)
        begins, counts = _integers([span.start for span in spans]), _integers([len(span) for span in spans])
        fields = {
            "resident": 1,
            "window": _RESIDENT_WINDOW,
            "kind": _KINDS[kind],
            "begin": whole.start,
            "end": whole.stop,
            "begins": ctypes.addressof(begins),
            "counts": ctypes.addressof(counts),
            "first_owned": owners.start,
            "owned": len(owners),
            "num_pieces": -(-max(map(len, spans)) // cut[0]),
        }
        residuals, starts = () if residual is None else (residual,), [0, places[0].numel()]
        return self._run(numbers, cut, places, (), residuals, starts, fields, header)

    def _run(
        self,
        numbers: Scaling,
        cut: tuple[int, bool],
        inputs: Tensors,
        outputs: Tensors,
        residuals: Tensors,
        starts: Sequence[int],
        fields: Mapping[str, int],
        header: bytes = b"",
    ) -> bool:
        table, weights = _integers(starts), (ctypes.c_float * len(numbers.weights))(*numbers.weights)
        sources, results, lost = addresses(inputs), addresses(outputs), addresses(residuals)
        between, last, (most, two_steps) = numbers.between, numbers.last, cut
        if last.finish != NOTHING and not (numbers.code and two_steps):
            between = Sum(between.prescale, last.factor, between.dtype, last.finish)
        job = _Job(
            hosts=ctypes.pointer(self._hosts),
            inputs=ctypes.addressof(sources),
            outputs=ctypes.addressof(results),
            residuals=ctypes.addressof(lost) if residuals else None,
            starts=ctypes.addressof(table),
            weights=ctypes.addressof(weights) if numbers.weights else None,
            num_tensors=len(starts) - 1,
            most=most,
            inside=numbers.inside,
            between=between,
            last=last,
            stage=numbers.stage,
            code=_CODE_NUMBERS[numbers.code],
            two_steps=two_steps,
            **fields,
        )
        if header:
            job.check = _AT_ONCE if residuals or numbers.stage != 1.0 else _ON_THE_WAY
            job.header[:] = header
        if self._group is None:
            return self._run_to_its_end(job)
        with self._group.lent() as ends:
            for streams, lent in zip(self._streams, ends, strict=True):
                for host, (sock, records) in lent.items():
                    pointer = None if records is None else ctypes.pointer(records)
                    streams[host] = _Stream(records=pointer, socket=sock)
            return self._run_to_its_end(job)

    def _run_to_its_end(self, job: _Job) -> bool:
        job_at = ctypes.addressof(job)

        def run_some() -> int:
            outcome: int = self._run_some(job_at, SLICE_NS)
            self.late_host = -1 - job.late if job.late < 0 else None
            return outcome

        def missing() -> str:
            return f"member {job.late} of this host" if job.late >= 0 else f"host {-1 - job.late} of the set"

        outcome = wait_until(run_some, self._check_alive, missing)
        if outcome < 0 and job.error == errno.EBADMSG:
            raise AuthenticationError("data from a peer was modified in transit")
        if outcome < 0:
            raise OSError(job.error, os.strerror(job.error))
        return outcome != _VOID

    def close(self) -> None:
        """Release the memory."""
        if self._segment is not None:
            self._segment.close()


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
