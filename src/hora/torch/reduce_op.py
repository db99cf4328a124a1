"""Reduce operations as plain ints, and the deprecated `average` flag."""

from __future__ import annotations

import operator
import warnings
from numbers import Integral

import torch

from hora.engine.request import ReduceOp

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)


def reduce_op(op: object) -> int:
    """Return the number of a reduce op.

    Raises:
        ValueError: it is no reduce op, as a string or an operation of torch.distributed.
    """
    if isinstance(op, Integral | torch.Tensor):  # torch.distributed's can be converted, but are numbered otherwise
        return operator.index(op)
    word = str(op).rpartition(".")[2].lower()
    meant = {"mean": "Average", "avg": "Average", "prod": "Product"}.get(word, word.capitalize())
    advice = f"write op=hvd.{meant}" if meant in __all__ else f"use one of {', '.join(f'hvd.{n}' for n in __all__)}"
    raise ValueError(f"op must be a reduce op, but it is {type(op).__name__} {op!r}: {advice}")


def handle_average_backwards_compatibility(
    op: int | None, average: bool | None, *, average_op: int = Average, sum_op: int = Sum
) -> int:
    """Return the reduce op that `op` and the deprecated `average` mean."""
    if average is None:
        return average_op if op is None else op
    if op is not None:
        raise ValueError(f"The op parameter supersedes average: pass only op (now op={op!r} and average={average!r})")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return average_op if average else sum_op
