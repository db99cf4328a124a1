"""Executing one agreed batch: from requests and signatures to a transport's flat tensors and back.

Called by a queue with the requests of this rank; a request is missing when this rank has joined and only contributes
values that change nothing. Errors are the queue's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch.autograd.graph import increment_version

from hora.engine.plan import Batch, Part
from hora.engine.request import DTYPES, Key, Kind, Reduce, ReduceOp, Request, Signature, full_names
from hora.engine.transport.arithmetic import arithmetic_of, identity
from hora.engine.transport.base import Transport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.errors import HorovodInternalError

__all__ = ["deliver", "execute", "execute_on_device", "flat", "write_back"]

Requests = Mapping[Key, Request]


def execute(batch: Batch, requests: Requests, transport: Transport, member: int, ranks: Sequence[int]) -> None:
    """Execute a batch of a collective on tensors; results are left in the requests."""
    _check_sizes(batch, requests)
    if batch.kind is Kind.ALLREDUCE:
        _allreduce(batch, requests, transport)
    elif batch.kind is Kind.ALLGATHER:
        _allgather(batch, requests, transport)
    elif batch.kind is Kind.BROADCAST:
        _broadcast(batch, requests, transport, member, ranks.index(batch.signature.root))
    elif batch.kind is Kind.ALLTOALL:
        _alltoall(batch, requests, transport, member)
    elif batch.kind is Kind.REDUCESCATTER:
        _reducescatter(batch, requests, transport, member, len(ranks))
    else:
        # A barrier that all members have agreed on has been reached by all of them: there is nothing left to do.
        assert batch.kind is Kind.BARRIER, batch.kind


def _check_sizes(batch: Batch, requests: Requests) -> None:
    """RuntimeError for a tensor that is not as large as all members have agreed on, because it was resized."""
    gives_outputs = batch.kind in (Kind.ALLREDUCE, Kind.BROADCAST)  # others' outputs are made here, in other shapes
    for part in batch.parts:
        request = requests.get(part.key)
        if request is None or not request.tensors:
            continue
        shape = request.signature.shapes[part.index]
        outputs = (request.outputs or ()) if gives_outputs else ()
        for tensor in (request.tensors[part.index], *outputs[part.index : part.index + 1]):
            end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
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
    """The same on a GPU, on a stream of our own, after the work that the requests were submitted behind.

    `home`: the GPU of a rank that has joined.
    """
    device = next((request.tensors[0].device for request in requests.values() if request.tensors), home)
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device, tuple(ranks))):
        stream = torch.cuda.current_stream()
        for request in requests.values():
            if request.device_event is not None:
                stream.wait_event(request.device_event)
            for tensor in (*request.tensors, *(request.outputs or ())):
                tensor.record_stream(stream)  # it may be freed while the GPU still has it to read
        execute(batch, requests, transport, member, ranks)
        finished = torch.cuda.Event()
        finished.record(stream)
        for request in requests.values():
            request.device_event = finished


def deliver(request: Request) -> None:
    """Make the results of a request that was executed on a GPU good for the caller's stream."""
    stream = torch.cuda.current_stream(request.tensors[0].device)
    if request.device_event is not None:
        stream.wait_event(request.device_event)
    for target, result in request.copy_back:
        target.detach().copy_(result)
    for tensor in request.outputs or ():
        if tensor.is_cuda:
            tensor.record_stream(stream)


def write_back(requests: Sequence[Request]) -> None:
    """Bring the results of requests on the CPU to where the caller wanted them.

    What cannot be done is that request's error.
    """
    for request in requests:
        try:
            for target, result in request.copy_back:
                with torch.inference_mode(target.is_inference()):
                    target.detach().copy_(result)
        except RuntimeError as problem:  # must not keep the request from being done
            request.error = HorovodInternalError(f"the result could not be written back: {problem}")
        for tensor in request.results or ():
            if not tensor.is_inference():
                increment_version(tensor)  # bytes were moved behind autograd's back; one by one for torch before 2.4


@cache
def _side_stream(device: torch.device | None, ranks: tuple[int, ...]) -> torch.cuda.Stream:
    """One for each process set: two sets do things in different orders on different ranks."""
    return torch.cuda.Stream(device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in one dimension, as transports want it."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))  # also for one element, whose stride may be anything


def _allreduce(batch: Batch, requests: Requests, transport: Transport) -> None:
    signature = batch.signature
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    residuals: list[torch.Tensor] = []
    reduce = signature.reduce
    for part in batch.parts:
        request = requests.get(part.key)
        if reduce.code.endswith("+"):
            residuals.append(_residual(part, request))
        if request is None:
            inputs.append(_placeholder(part, signature))
            outputs.append(inputs[-1])
            continue
        source, out = request.tensors[part.index], (request.outputs or request.tensors)[part.index]
        inputs.append(flat(source))
        outputs.append(inputs[-1] if out is source else flat(out))
    scaled = reduce.prescale != 1.0 and reduce.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    if scaled and len(requests) < len({part.key for part in batch.parts}):
        # A placeholder that is not 0 must stay what it is: what this rank really contributes is scaled here instead.
        inputs = [
            _prescaled(tensor, reduce) if part.key in requests else tensor
            for part, tensor in zip(batch.parts, inputs, strict=True)
        ]
        reduce = reduce._replace(prescale=1.0)
    if signature.op == ReduceOp.ADASUM:
        transport.adasum(inputs, outputs, reduce)
    elif reduce.code:
        assert isinstance(transport, HierarchicalTransport), transport
        transport.allreduce_compressed(inputs, outputs, reduce, residuals)
    else:
        transport.allreduce(inputs, outputs, reduce)


def _residual(part: Part, request: Request | None) -> torch.Tensor:
    """Return the rounding error kept for a tensor. A rank that has joined carries others' numbers, but keeps none."""
    if request is not None:
        return request.residuals[part.index]
    announced = next(item for item in part.signatures if item is not None)
    return torch.zeros(prod(announced.shapes[part.index]), dtype=torch.float32, device="cpu")


def _prescaled(tensor: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    scaled = torch.empty_like(tensor)
    arithmetic_of(Reduce(prescale=reduce.prescale), tensor.dtype, 1, elsewhere=True).prepare(tensor, scaled)
    return scaled


def _placeholder(part: Part, signature: Signature) -> torch.Tensor:
    """Return a joined rank's contribution: the value that leaves the others' result as it is."""
    announced = next(item for item in part.signatures if item is not None)
    dtype = DTYPES[announced.dtypes[part.index]]
    count = prod(announced.shapes[part.index])
    value = 0 if signature.op == ReduceOp.ADASUM else identity(signature.op, dtype)
    return torch.full((count,), value, dtype=dtype, device=announced.device_type)


def _allgather(batch: Batch, requests: Requests, transport: Transport) -> None:
    inputs, outputs, counts = [], [], []
    for part in batch.parts:
        request = requests[part.key]
        source = request.tensors[part.index]
        shapes = [signature.shapes[part.index] for signature in part.signatures if signature is not None]
        output = _output(request, part.index, (sum(shape[0] for shape in shapes), *source.shape[1:]))
        inputs.append(flat(source))
        outputs.append(flat(output))
        counts.append([prod(shape) for shape in shapes])
    transport.allgather(inputs, outputs, counts)


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


def _reducescatter(batch: Batch, requests: Requests, transport: Transport, member: int, num_members: int) -> None:
    inputs, outputs, counts = [], [], []
    for part in batch.parts:
        request = requests[part.key]
        source = request.tensors[part.index]
        rows, row = source.shape[0], prod(source.shape[1:])
        shares = [rows // num_members + (peer < rows % num_members) for peer in range(num_members)]
        output = _output(request, part.index, (shares[member], *source.shape[1:]))
        inputs.append(flat(source))
        outputs.append(flat(output))
        counts.append([share * row for share in shares])
    transport.reducescatter(inputs, outputs, counts, batch.signature.reduce)


def _output(request: Request, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Return the caller's output, where it gave one of this size, or a new one."""
    source = request.tensors[index]
    if request.results is not None and request.outputs is not None:
        given = request.outputs[index]
        if given.numel() == prod(shape):
            return given
    output = source.new_empty(tuple(shape))
    request.outputs = request.outputs or [output] * len(request.tensors)
    request.outputs[index] = output
    return output
