"""A user's arguments become a `Request`, or a clear error at once.

Everything that one rank can know to be wrong is refused here, before anything is announced. What only a comparison of
the ranks can show is found by `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index, is_

import torch

from hora.engine.request import DTYPES, Kind, Reduce, ReduceOp, Request, Signature, dtype_name
from hora.errors import HorovodInternalError

__all__ = ["Validator", "check_ranks", "check_ranks_at_init"]

_MOVED = frozenset(DTYPES.values())
_REDUCED = frozenset((torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SMALL = frozenset((torch.uint8, torch.int8, torch.int16))
_OPS = frozenset(int(op) for op in ReduceOp)
_SMALL_OPS = frozenset((ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX))
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_KEPT_SIGNATURES = 8192
_ALLREDUCE = Kind.ALLREDUCE.value
_OPERATIONS = {kind: kind.name.lower() for kind in Kind}


class Validator:
    """Checks the arguments of collectives for one set with these global ranks.

    What depends on nothing but a tensor's kind is checked once: training repeats itself.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._known: dict[object, Signature] = {}
        self._gpus: list[torch.device] = []  # that this rank uses here, in the order of their first use

    @property
    def home_gpu(self) -> torch.device | None:
        """The first GPU that this rank has used here, where it also takes part in what it has not submitted itself."""
        return self._gpus[0] if self._gpus else None

    def settle(self, gpu: torch.device) -> None:
        """This is the rank's GPU, unless it has used another one here."""
        if not self._gpus:
            self._gpus.append(gpu)

    def device_label(self, device: torch.device) -> str:
        """Return a device as other members see it: "cpu", "cuda", or "cuda/2" for a second GPU, of any number."""
        if device.type == "cpu":
            return "cpu"
        if device not in self._gpus:
            self._gpus.append(device)
        number = self._gpus.index(device) + 1
        return device.type if number == 1 else f"{device.type}/{number}"

    def request(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor],
        *,
        outputs: Sequence[torch.Tensor] | None,
        name: str | None,
        reduce: Reduce,
        root_rank: int,
        splits: Sequence[int] | torch.Tensor | None,
        grouped: bool,
    ) -> Request:
        """The request for a collective on tensors."""
        key, signature = None, None
        if splits is None and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
            key = _key(kind._value_, tensors[0], name, reduce, root_rank, grouped)
            signature = self._known.get(key)
        if signature is None:
            signature = self._check(kind, tensors, splits, name, reduce, root_rank, grouped)
            if key is not None:
                if len(self._known) >= _KEPT_SIGNATURES:
                    self._known.clear()
                self._known[key] = signature
        if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors):
            with torch.inference_mode(False):
                return _request(signature, kind, tensors, outputs)
        return _request(signature, kind, tensors, outputs)

    def known_allreduce(self, tensor: torch.Tensor, name: str | None, reduce: Reduce) -> Signature | None:
        """The signature of an allreduce of one tensor, if there has been one like it."""
        return self._known.get(_key(_ALLREDUCE, tensor, name, reduce, -1, False))

    def _check(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor],
        splits: Sequence[int] | torch.Tensor | None,
        name: str | None,
        reduce: Reduce,
        root_rank: int,
        grouped: bool,
    ) -> Signature:
        operation, op = _OPERATIONS[kind], int(reduce.op)
        if not tensors:
            raise ValueError(f"{operation} needs at least one tensor, but the list is empty")
        for tensor in tensors:
            _check_tensor(kind, tensor)
        _check_op(kind, op)  # before the dtypes, of which each op takes others
        for tensor in tensors:
            _check_dtype(kind, op, tensor.dtype)
        device = self.device_label(_device(tensors))
        extra = _check_kind(kind, tensors, root_rank, splits, self._ranks)
        return Signature(
            int(kind),
            f"grouped_{operation}" if grouped else operation,
            name,
            tuple([dtype_name(tensor.dtype) for tensor in tensors]),
            tuple([tuple(tensor.shape) for tensor in tensors]),
            op if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) else int(ReduceOp.SUM),
            float(reduce.prescale),
            float(reduce.postscale),
            root_rank if kind is Kind.BROADCAST else -1,
            device,
            extra,
            code=reduce.code,
        )


def _key(kind: int, tensor: torch.Tensor, name: str | None, reduce: Reduce, root_rank: int, grouped: bool) -> object:
    return kind, name, reduce, root_rank, grouped, tensor.dtype, tensor.shape, tensor.device, tensor.layout


def _check_tensor(kind: Kind, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{_OPERATIONS[kind]} takes torch tensors, but it was given {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{_OPERATIONS[kind]} takes dense tensors, but it was given {tensor.layout}; use sparse_allreduce_async"
        )


def _check_op(kind: Kind, op: int) -> None:
    if kind is Kind.REDUCESCATTER and op in _OPS and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(f"reducescatter only supports AVERAGE and SUM, but it was given {ReduceOp(op).name}")
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) and op not in _OPS:
        raise ValueError(f"unknown reduce op {op}; use one of hvd.Average, Sum, Adasum, Min, Max, Product")


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that any thread may write to, which one of inference mode is not."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _request(
    signature: Signature, kind: Kind, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None
) -> Request:
    inputs = [
        _ordinary(tensor if not tensor.requires_grad and tensor.is_contiguous() else tensor.detach().contiguous())
        for tensor in tensors
    ]
    if outputs is None:
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return Request(signature, inputs, [torch.empty_like(tensor) for tensor in inputs])
        return Request(signature, inputs)
    if outputs is tensors or all(map(is_, outputs, tensors)):
        results = inputs
    else:
        results = [
            _ordinary(output.detach()) if output.is_contiguous() else torch.empty_like(output).contiguous()
            for output in outputs
        ]
    request = Request(signature, inputs, results)
    # A tensor that is not contiguous is worked on in a copy, which goes back at the end.
    request.copy_back = [
        pair for pair in zip(outputs, results, strict=True) if pair[0] is not pair[1] and not pair[0].is_contiguous()
    ]
    for output, _ in request.copy_back:
        if any(stride == 0 and length > 1 for stride, length in zip(output.stride(), output.shape, strict=True)):
            raise ValueError(
                f"{_OPERATIONS[kind]} cannot work in place on a tensor whose elements share memory (shape "
                f"{list(output.shape)}, strides {list(output.stride())}, from expand()); clone() it first"
            )
    request.results = list(outputs)
    return request


def _check_dtype(kind: Kind, op: int, dtype: torch.dtype) -> None:
    what, accepted = _OPERATIONS[kind], dtype in _MOVED
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        what = f"{what} with {ReduceOp(op).name}"
        accepted = dtype in _REDUCED or (dtype in _SMALL and op in _SMALL_OPS)
        if op == ReduceOp.ADASUM:
            accepted = dtype in _FLOATS
    if not accepted:
        raise ValueError(f"Tensor type {dtype} is not supported by {what}; convert the tensor first")


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    first = tensors[0].device
    if first.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tensors must lie on the CPU or on a CUDA device, but this one lies on {first}; move it with .cpu()"
        )
    for tensor in tensors:
        if tensor.device != first:
            raise HorovodInternalError(
                f"all tensors of a group must be on the same device, but {first} and {tensor.device} were given"
            )
    return first


def _check_kind(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    splits: Sequence[int] | torch.Tensor | None,
    ranks: Sequence[int],
) -> tuple[int, ...]:
    if kind is Kind.BROADCAST and root_rank not in ranks:
        raise ValueError(
            f"broadcast got an invalid root rank: {root_rank}; the process set has the ranks {list(ranks)}"
        )
    if kind is Kind.REDUCESCATTER and any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter does not support scalar tensors; give it at least one dimension")
    if kind is Kind.ALLTOALL:
        return _check_splits(tensors[0], splits, len(ranks))
    return ()


def _check_splits(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError("alltoall does not support scalar tensors; give it at least one dimension")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                "alltoall without splits needs a first dimension that is an even multiple of the number of workers: "
                f"{rows} rows, {size} workers"
            )
        return (rows // size,) * size
    if not isinstance(splits, torch.Tensor):
        values = list(splits)
        try:
            splits = torch.tensor([index(value) for value in values], dtype=torch.int32, device="cpu")
        except (TypeError, RuntimeError):  # not whole numbers (but numpy's will do), or too large
            raise ValueError(f"alltoall splits must be 32-bit integers, but they are {values}") from None
    if splits.dim() != 1:
        raise ValueError(f"alltoall expects a 1-D tensor of splits, but it has {splits.dim()} dimensions")
    if splits.dtype != torch.int32:
        raise ValueError(f"alltoall splits must be 32-bit integer values, but they are {splits.dtype}")
    if splits.numel() != size:
        raise ValueError(
            f"alltoall needs as many splits as the number of workers, which is {size}, but there are {splits.numel()}"
        )
    counts = tuple(int(value) for value in splits.tolist())
    if any(value < 0 for value in counts):
        raise ValueError(f"alltoall splits must not be negative, but they are {list(counts)}")
    if sum(counts) > rows:
        raise ValueError(f"the sum of the alltoall splits, {sum(counts)}, is greater than the first dimension, {rows}")
    return counts


def check_ranks_at_init(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """`check_ranks`, with the words of a failed initialisation."""
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
