"""torch's reduction operators and dtypes, mapped to the engine's.

The engine sums, averages, multiplies and compares real numbers. Complex numbers are reduced as pairs of real ones,
bools by comparison. Bitwise operators and dtypes that the engine only moves are folded: each member gathers all inputs
and reduces them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold_left
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hora.engine.request import DTYPES, Reduce, ReduceOp
from hora.engine.transport.arithmetic import COMBINE

_KNOWN = frozenset(DTYPES.values())
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUM, PREMUL_SUM = hash(dist.ReduceOp.SUM), hash(dist.ReduceOp.PREMUL_SUM)
_Function = Callable[[Tensor, Tensor], Tensor]
_ENGINE = {name: ReduceOp[name] for name in ("SUM", "PRODUCT", "MIN", "MAX")} | {"AVG": ReduceOp.AVERAGE}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_NAMES = {hash(getattr(dist.ReduceOp, name)): name for name in (*_ENGINE, *_BITWISE, "PREMUL_SUM")}
_BOOL = {"SUM": ReduceOp.MAX, "MAX": ReduceOp.MAX, "BOR": ReduceOp.MAX} | dict.fromkeys(
    ("PRODUCT", "MIN", "BAND"), ReduceOp.MIN
)
_SMALL = (torch.uint8, torch.int8, torch.int16)
_FOLDS = {op: function for op, function in COMBINE.items() if op != ReduceOp.AVERAGE}


class Reduction(NamedTuple):
    """Reduction of tensors of one dtype: by the engine, or by `folded` if that is not None."""

    reduce: Reduce
    folded: _Function | None = None
    as_real: bool = False
    as_bytes: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view in a dtype that the engine reduces."""
        if self.as_real:
            return torch.view_as_real(tensor)
        return tensor.view(torch.uint8) if self.as_bytes else tensor


def reduction_of(opts: Any, dtype: torch.dtype, operation: str) -> Reduction:
    """Return the reduction of a dtype. Raises ValueError if the dtype does not support the operator."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    name = _NAMES.get(hash(op), str(op))
    if name == "PREMUL_SUM":
        return _premultiplied(op, dtype, operation)
    if dtype is torch.bool and name in _BOOL:
        return Reduction(Reduce(_BOOL[name]), as_bytes=True)
    if name in _BITWISE:
        return Reduction(Reduce(), _folding(_BITWISE[name], dtype, operation, name))
    engine_op = _ENGINE.get(name)
    if engine_op is None or dtype is torch.bool:
        raise _refusal(operation, name, dtype)
    if dtype.is_complex:
        if name not in ("SUM", "AVG"):
            raise _refusal(operation, name, dtype)
        return Reduction(Reduce(engine_op), as_real=True)
    if dtype in _KNOWN and not (dtype in _SMALL and name in ("PRODUCT", "AVG")):
        return Reduction(Reduce(engine_op))
    if engine_op not in _FOLDS:
        raise _refusal(operation, name, dtype)
    return Reduction(Reduce(engine_op), _folding(_FOLDS[engine_op], dtype, operation, name))


def _folding(function: _Function, dtype: torch.dtype, operation: str, name: str) -> _Function:
    """Return the function, if torch has it for this dtype."""
    one = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        function(one, one)
    except RuntimeError:
        raise _refusal(operation, name, dtype) from None
    return function


def _premultiplied(op: Any, dtype: torch.dtype, operation: str) -> Reduction:
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    if isinstance(factor, Tensor):
        factor = factor.item()
    if not (dtype.is_floating_point or dtype.is_complex):
        raise _refusal(operation, "PREMUL_SUM", dtype)
    return Reduction(Reduce(ReduceOp.SUM, prescale=float(factor)), as_real=dtype.is_complex)


def _refusal(operation: str, name: str, dtype: torch.dtype) -> ValueError:
    return ValueError(
        f"{operation} cannot reduce {dtype} by ReduceOp.{name}: convert the tensor, or use another operator"
    )


def fold(one: Reduction, parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the reduction of the members' inputs in rank order."""
    assert one.folded is not None or one.reduce.op in _FOLDS
    return fold_left(one.folded or _FOLDS[one.reduce.op], parts).view_as(like)


def moved(tensor: Tensor) -> Tensor:
    """Return a view in a dtype that the engine moves."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.view(_OF_SIZE[tensor.dtype.itemsize])
