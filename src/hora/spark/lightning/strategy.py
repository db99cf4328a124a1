"""The Horovod strategy: how a Lightning `Trainer` uses the ranks of a job, its own launcher left out.

One process and one device a rank; gradients are averaged by `hvd.DistributedOptimizer` as backward goes on, and waited
for before Lightning clips or steps. Works wherever `hvd.init()` does: `Trainer(strategy=HorovodStrategy())`, or by its
name, `Trainer(strategy="horovod")`, once it was imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import hora.torch as hvd
from hora.spark.lightning.elastic import make_elastic
from hora.spark.lightning.package import Package
from hora.torch.elastic.loop import is_elastic

__all__ = ["horovod_strategy"]

_MEANS = (None, "mean", "avg", "average")
_OPS: dict[str, int] = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
_ANY_NUMBER = 2**31  # of backward passes between two steps, where a schedule decides


@functools.cache
def horovod_strategy(package: Package) -> type[Any]:
    """The class of the strategy for this package, registered there as "horovod"."""
    parallel = package.part("strategies.parallel").ParallelStrategy
    strategy = type("HorovodStrategy", (_Horovod, parallel), {"__module__": __name__, "__doc__": _Horovod.__doc__})
    registry = package.part("strategies").StrategyRegistry
    if "horovod" not in registry.available_strategies():
        registry.register("horovod", strategy, description="Horovod's ranks, by Hora")
    return strategy


class _Horovod:
    """Trains on the ranks of `hvd`: multiplies the learning rate by their number, broadcasts rank 0's parameters.

    In an elastic job `fit` goes on by the step when ranks are lost or join; `new_data`: see `make_elastic`.
    """

    # What Lightning's own class gives: this one is mixed in before it.
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[Any]
    parallel_devices: list[torch.device] | None
    model: Any
    strategy_name = "horovod"
    is_distributed = True  # Lightning gives every rank its own part of the data by default

    def __init__(self, *args: Any, new_data: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hvd.init()
        self._new_data = new_data
        self._accumulating = False
        self.take_rank()

    def take_rank(self) -> None:
        """Have Lightning print and write on rank 0 alone."""
        from lightning_utilities.core import rank_zero

        vars(rank_zero.rank_zero_only)["rank"] = hvd.rank()

    # ---- identity ----------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return hvd.rank()

    @property
    def local_rank(self) -> int:
        return hvd.local_rank()

    @property
    def node_rank(self) -> int:
        return hvd.cross_rank()

    @property
    def world_size(self) -> int:
        return hvd.size()

    @property
    def is_global_zero(self) -> bool:
        return hvd.rank() == 0

    @property
    def root_device(self) -> torch.device:
        """The one device, or that of the local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank if self.local_rank < len(devices) else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # ---- training ----------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's own, then every learning rate times the number of ranks, rank 0's state, averaged gradients."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.scale_rates(hvd.size())
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._wrap(trainer)
        if is_elastic():
            make_elastic(trainer, self._new_data)

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate, and what schedulers begin with."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for config in self.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [rate * factor for rate in config.scheduler.base_lrs]

    def _wrap(self, trainer: Any) -> None:
        """Make every optimizer a distributed one, with only its own parameters; its schedulers go on with it."""
        scheduled = any(hasattr(callback, "going_to_accumulate_grad_batches") for callback in trainer.callbacks)
        passes = _ANY_NUMBER if scheduled else max(1, int(trainer.accumulate_grad_batches))
        if not self.lightning_module.automatic_optimization:
            passes = _ANY_NUMBER
        for number, optimizer in enumerate(self.optimizers):
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            named = [pair for pair in self.lightning_module.named_parameters() if id(pair[1]) in own]
            wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, backward_passes_per_step=passes)
            for config in self.lr_scheduler_configs:
                if getattr(config.scheduler, "optimizer", None) is optimizer:
                    config.scheduler.optimizer = wrapped
            self.optimizers[number] = wrapped

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Wait for the averages before Lightning looks at the gradients, unless more are to be added first."""
        for optimizer in self.optimizers:
            if not self._accumulating and optimizer._backward_seen_since_step():  # type: ignore[attr-defined]
                optimizer.synchronize()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Lightning's, whose closure runs backward and so has synchronised already."""
        bare: Any = getattr(optimizer, "_optimizer", optimizer)
        with bare.skip_synchronize():
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for the others; the ranks stay up, for whoever started them."""
        if not is_elastic():  # there they have ended the training together, and may leave one by one
            self.barrier()
        self.cluster_environment = None
        for kind in type(self).__mro__:
            if kind.__name__ == "Strategy":
                kind.teardown(self)  # type: ignore[attr-defined]  # the parallel one's clears other variables
                return

    # ---- collectives -------------------------------------------------------------------------------------------------

    @property
    def _single_process(self) -> bool:
        """True where there is nobody to wait for: a rank that has raised tidies up while the others still train."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return hvd.size() == 1 or (trainer is not None and bool(trainer.interrupted))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean of all ranks' (`mean`, `avg`, None), or `sum`, `max`, `min`."""
        if group is not None:
            raise ValueError("a process group cannot be given to the Horovod strategy: hvd's process sets are others")
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if name is not None and not isinstance(name, str):  # torch.distributed.ReduceOp
            name = str(name).rpartition(".")[2].lower()
        op = hvd.Average if name in _MEANS else _OPS.get(str(name))
        if op is None:
            raise ValueError(f"reduce_op must be mean, sum, max or min, but it is {reduce_op!r}")
        values = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor, device=self.root_device)
        if op == hvd.Average and not values.is_floating_point():
            values = values.float()
        return values if self._single_process else hvd.allreduce(values, op=op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """All ranks' tensors, in a new first dimension; the tensor itself where there is one rank."""
        if group is not None:
            raise ValueError("a process group cannot be given to the Horovod strategy: hvd's process sets are others")
        if self._single_process:
            return tensor
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            return hvd.allgather(tensor.unsqueeze(0).contiguous())

    def barrier(self, name: str | None = None) -> None:
        if not self._single_process:
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._single_process else hvd.broadcast_object(obj, root_rank=src)
