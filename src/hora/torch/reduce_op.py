"""The reduce operations as users write them (plain ints), and the deprecated `average` flag."""

from __future__ import annotations

from types import SimpleNamespace

from hora.engine.request import ReduceOp
from hora.horovod.util import get_average_backwards_compatibility_fun

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "handle_average_backwards_compatibility"]

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(
    SimpleNamespace(Average=Average, Sum=Sum)
)
