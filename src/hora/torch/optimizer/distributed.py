"""`DistributedOptimizer`: checks its arguments and makes an optimizer of `base`, `adasum` or `sharded`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hora import engine
from hora.engine.request import ReduceOp
from hora.torch.compression import Compression, Compressor, PowerSGD
from hora.torch.optimizer.base import _DistributedOptimizer, bare_copy, takes_part
from hora.torch.optimizer.grad_scaler import reduce_before_unscaling
from hora.torch.optimizer.order import in_common_order
from hora.torch.optimizer.parameters import parameter_groups, parameter_names
from hora.torch.optimizer.powersgd import PowerSGDMemory
from hora.torch.optimizer.reducer import ReduceOptions
from hora.torch.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer", "of_class"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    sharded: bool = False,
) -> Any:
    """The same optimizer (hyper-parameters, groups and state kept), with gradients reduced over `process_set`.

    `sharded=True` divides optimizer work and state over the ranks, and on one host keeps parameters once in shared
    memory.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(f"{type(optimizer).__name__} is a DistributedOptimizer already; wrap the plain optimizer once")
    op = int(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError(
            f"gradient_predivide_factor ({gradient_predivide_factor}) is not supported with op {ReduceOp(op).name}, "
            "only with Average"
        )
    if gradient_predivide_factor != 1.0 and torch.version.hip is not None:
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; use groups instead", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, but it is {backward_passes_per_step}")
    if compression is PowerSGD:
        compression = PowerSGD()
    if isinstance(compression, PowerSGD):
        _check_powersgd(op, gradient_predivide_factor, groups)
    names = parameter_names(optimizer, named_parameters)
    hooked = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grouped = parameter_groups(groups, hooked)
    # In an elastic world newcomers make their optimizers while the others train and would not answer.
    if isinstance(groups, int) and takes_part(process_set) and not engine.current_runtime().world.elastic:
        grouped = parameter_groups(groups, in_common_order(hooked, names, process_set))
    options = ReduceOptions(
        process_set=process_set,
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        memory=PowerSGDMemory(compression) if isinstance(compression, PowerSGD) else None,
    )
    reduce_before_unscaling()
    result = of_class(optimizer, _kind_of_optimizer(options, optimizer, grouped, sharded=sharded))
    result._distribute(options, names=names, groups=grouped, backward_passes_per_step=backward_passes_per_step)
    return result


def _check_powersgd(op: int, gradient_predivide_factor: float, groups: object) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"Compression.powersgd reduces with Average or Sum, but op is {ReduceOp(op).name}")
    if gradient_predivide_factor != 1.0:
        raise ValueError(
            f"Compression.powersgd needs gradient_predivide_factor=1.0, but it is {gradient_predivide_factor}"
        )
    if groups is not None:
        raise ValueError("Compression.powersgd arranges gradients by itself; leave groups and num_groups out")


def _kind_of_optimizer(
    options: ReduceOptions, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]], *, sharded: bool
) -> type:
    if sharded:
        from hora.torch.sharded.optimizer import ShardedOptimizer, check_shardable

        check_shardable(options, optimizer, groups)
        return ShardedOptimizer
    if options.op == ReduceOp.ADASUM:
        if options.process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet")
        world = engine.current_runtime().world
        if world.size > 1 or world.elastic:
            from hora.torch.optimizer.adasum import DeltaOptimizer

            return DeltaOptimizer
    return _DistributedOptimizer


def of_class(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """Return an object of a new class that shares groups and state with `optimizer`, without its constructor."""
    base = type(optimizer)
    names = {"__module__": "horovod.torch.optimizer", "__qualname__": base.__qualname__, "_base_class": base}
    return bare_copy(optimizer, type(base.__name__, (mixin, base), names))
