"""Execution of one agreed batch: from requests and signatures to a transport's flat tensors and back.

A queue calls it with this rank's requests. A request is missing if this rank has joined and only contributes neutral
values. The queue handles errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch.autograd.graph import increment_version

from hora.engine.plan import Batch, Part
from hora.engine.request import DTYPES, Key, Kind, Reduce, ReduceOp, Request, full_names
from hora.engine.transport.arithmetic import arithmetic_of, identity
from hora.engine.transport.base import Transport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.errors import HorovodInternalError

Requests = Mapping[Key, Request]


def execute(batch: Batch, requests: Requests, transport: Transport, member: int, ranks: Sequence[int]) -> None:
    """Execute a batch of a collective on tensors; results are stored in the requests."""
    _check_sizes(batch, requests)
    if batch.kind is Kind.ALLREDUCE:
        _allreduce(batch, requests, transport)
    elif batch.kind is Kind.BROADCAST:
        _broadcast(batch, requests, transport, member, ranks.index(batch.signature.root))
    elif batch.kind is Kind.ALLTOALL:
        _alltoall(batch, requests, transport, member)
    elif batch.kind in (Kind.ALLGATHER, Kind.REDUCESCATTER):
        _gather_or_scatter(batch, requests, transport, member, len(ranks))
    else:
        # All members have reached a barrier that all have agreed on: nothing is left to do.
        assert batch.kind is Kind.BARRIER, batch.kind


def _check_sizes(batch: Batch, requests: Requests) -> None:
    """Raise RuntimeError for a tensor that was resized after all members agreed on its size."""
    gives_outputs = batch.kind in (Kind.ALLREDUCE, Kind.BROADCAST)  # those of other kinds have other shapes
    for part in batch.parts:
        request = requests.get(part.key)
        if request is None or not request.tensors:
            continue
        shape = request.signature.shapes[part.index]
        outputs = (request.outputs or ()) if gives_outputs else ()
        for tensor in (request.tensors[part.index], *outputs[part.index : part.index + 1]):
            # An empty tensor may begin behind the end of its storage.
            end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize if tensor.numel() else 0
            if tensor.shape != shape or tensor.untyped_storage().nbytes() < end:
                name = full_names(*part.key, len(request.tensors))[part.index]
                raise RuntimeError(
                    f"{name} was submitted with a tensor of shape {list(shape)}, which has shape {list(tensor.shape)} "
                    f"and a storage of {tensor.untyped_storage().nbytes()} bytes now; do not resize a tensor before "
                    "synchronize()"
                )


def execute_on_device(
    batch: Batch, requests: Requests, transport: Transport, member: int, ranks: Sequence[int], home: torch.device | None
) -> None:
    """Execute the batch on a separate stream of a GPU (`home` if this rank has joined), after the requests' work."""
    device = next((request.tensors[0].device for request in requests.values() if request.tensors), home)
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device, tuple(ranks))):
        stream = torch.cuda.current_stream()
        for request in requests.values():
            if request.device_event is not None:
                stream.wait_event(request.device_event)
            for tensor in (*request.tensors, *(request.outputs or ())):
                tensor.record_stream(stream)  # it may be freed while the GPU still reads it
        execute(batch, requests, transport, member, ranks)
        finished = torch.cuda.Event()
        finished.record(stream)
        for request in requests.values():
            request.device_event = finished


def _end_on_device(request: Request, ranks: Sequence[int]) -> None:
    """Write the results of a request that ran on a GPU to the caller's tensors, on the same stream."""
    device = request.tensors[0].device
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device, tuple(ranks))):
        stream = torch.cuda.current_stream()
        for tensor in (*request.targets, *(target for target, _ in request.copy_back)):
            if tensor.is_cuda and tensor.layout == torch.strided:
                tensor.record_stream(stream)
        for target, result in request.copy_back:
            target.detach().copy_(result)
        request.run_last()
        request.device_event = torch.cuda.Event()
        request.device_event.record(stream)


def deliver(request: Request) -> None:
    """Make the results of a request that ran on a GPU available to the caller's stream."""
    stream = torch.cuda.current_stream(request.tensors[0].device)
    if request.device_event is not None:
        stream.wait_event(request.device_event)
    for tensor in request.outputs or ():
        if tensor.is_cuda:
            tensor.record_stream(stream)


def end(requests: Sequence[Request], ranks: Sequence[int]) -> None:
    """Write the results of executed requests to the callers' tensors; a failure becomes that request's error."""
    for request in requests:
        if request.device_event is None:
            _write_back(request)
        elif request.copy_back or request.last is not None:
            _end_on_device(request, ranks)


def _write_back(request: Request) -> None:
    try:
        for target, result in request.copy_back:
            with torch.inference_mode(target.is_inference()):
                target.detach().copy_(result)
    except RuntimeError as problem:  # the request must still complete
        request.error = HorovodInternalError(f"the result could not be written back: {problem}")
    for tensor in request.results or ():
        if not tensor.is_inference():
            increment_version(tensor)  # bytes were written without autograd; one by one for torch before 2.4
    request.run_last()


@cache
def _side_stream(device: torch.device | None, ranks: tuple[int, ...]) -> torch.cuda.Stream:
    """Return a stream per process set: two sets run in different orders on different ranks."""
    return torch.cuda.Stream(device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in one dimension, as transports need it."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))  # also for one element, whose stride is arbitrary


def _allreduce(batch: Batch, requests: Requests, transport: Transport) -> None:
    reduce = batch.signature.reduce
    keeps_residuals = reduce.code.endswith("+")
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    residuals: list[torch.Tensor] = []
    for part in batch.parts:
        request = requests.get(part.key)
        if request is None:
            inputs.append(_placeholder(part, reduce.op))
            outputs.append(inputs[-1])
            if keeps_residuals:  # a joined rank carries others' numbers, but keeps no residual
                residuals.append(torch.zeros_like(inputs[-1]))
            continue
        if keeps_residuals:
            residuals.append(request.residuals[part.index])
        source, out = request.tensors[part.index], (request.outputs or request.tensors)[part.index]
        inputs.append(flat(source))
        outputs.append(inputs[-1] if out is source else flat(out))
    scaled = reduce.prescale != 1.0 and reduce.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    if scaled and len(requests) < len({part.key for part in batch.parts}):
        # A placeholder other than 0 must not be scaled: scale this rank's real contribution here instead.
        inputs = [
            _prescaled(tensor, reduce) if part.key in requests else tensor
            for part, tensor in zip(batch.parts, inputs, strict=True)
        ]
        reduce = reduce._replace(prescale=1.0)
    if reduce.code:
        assert isinstance(transport, HierarchicalTransport), transport
        transport.allreduce(inputs, outputs, reduce, residuals)
    else:
        transport.allreduce(inputs, outputs, reduce)


def _prescaled(tensor: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    scaled = torch.empty_like(tensor)
    arithmetic_of(Reduce(prescale=reduce.prescale), tensor.dtype, 1, elsewhere=True).prepare(tensor, scaled)
    return scaled


def _placeholder(part: Part, op: int) -> torch.Tensor:
    """Return a joined rank's contribution: the value that leaves the others' result unchanged."""
    announced = next(filter(None, part.signatures))
    dtype = DTYPES[announced.dtypes[part.index]]
    value = 0 if op == ReduceOp.ADASUM else identity(op, dtype)
    return torch.full((prod(announced.shapes[part.index]),), value, dtype=dtype, device=announced.device_type)


def _gather_or_scatter(batch: Batch, requests: Requests, transport: Transport, member: int, num_members: int) -> None:
    """Execute an allgather, whose output has the rows of all members, or a reducescatter, whose has this member's."""
    inputs, outputs, counts, gathers = [], [], [], batch.kind is Kind.ALLGATHER
    for part in batch.parts:
        request = requests[part.key]
        source = request.tensors[part.index]
        rows, row = source.shape[0], prod(source.shape[1:])
        if gathers:
            shares = [signature.shapes[part.index][0] for signature in part.signatures if signature is not None]
        else:
            shares = [rows // num_members + (peer < rows % num_members) for peer in range(num_members)]
        output = _output(request, part.index, (sum(shares) if gathers else shares[member], *source.shape[1:]))
        inputs.append(flat(source))
        outputs.append(flat(output))
        counts.append([share * row for share in shares])
        request.answer = counts[-1]
    if gathers:
        transport.allgather(inputs, outputs, counts)
    else:
        transport.reducescatter(inputs, outputs, counts, batch.signature.reduce)


def _broadcast(batch: Batch, requests: Requests, transport: Transport, member: int, root: int) -> None:
    tensors = []
    for part in batch.parts:
        request = requests[part.key]
        assert request.outputs is not None
        source, out = request.tensors[part.index], request.outputs[part.index]
        if member == root and out is not source:
            out.copy_(source)
        tensors.append(flat(out))
    transport.broadcast(tensors, root)


def _alltoall(batch: Batch, requests: Requests, transport: Transport, member: int) -> None:
    (part,) = batch.parts
    request = requests[part.key]
    source = request.tensors[0]
    row = prod(source.shape[1:])
    send = request.signature.extra
    receive = [signature.extra[member] for signature in part.signatures if signature is not None]
    output = _output(request, 0, (sum(receive), *source.shape[1:]))
    transport.alltoall(flat(source), flat(output), [rows * row for rows in send], [rows * row for rows in receive])
    request.outputs = [output, torch.tensor(receive, dtype=torch.int32, device="cpu")]


def _output(request: Request, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Return the caller's output if it has this size, else a new one."""
    source = request.tensors[index]
    if request.results is not None and request.outputs is not None:
        given = request.outputs[index]
        if given.numel() == prod(shape):
            return given
    output = source.new_empty(tuple(shape))
    request.outputs = request.outputs or [output] * len(request.tensors)
    request.outputs[index] = output
    return output
