"""The Horovod strategy: makes a Lightning `Trainer` use the ranks of a job, without Lightning's launcher.

Each rank is one process with one device. `hvd.DistributedOptimizer` averages gradients while backward runs, and the
strategy waits for them before Lightning clips or steps. Works wherever `hvd.init()` does:
`Trainer(strategy=HorovodStrategy())`, or `Trainer(strategy="horovod")` once it is imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

import hora.torch as hvd
from hora.spark.lightning.elastic import make_elastic
from hora.torch.elastic.loop import is_elastic

_MEANS = (None, "mean", "avg", "average")
_OPS: dict[str, int] = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
_ANY_NUMBER = 2**31  # of backward passes between two steps, if a schedule decides


@functools.cache
def horovod_strategy(package: ModuleType) -> type[Any]:
    """Return the strategy class for this package, registered there as "horovod"."""
    parallel = package.strategies.ParallelStrategy
    strategy = type("HorovodStrategy", (_Horovod, parallel), {"__module__": __name__, "__doc__": _Horovod.__doc__})
    registry = package.strategies.StrategyRegistry
    if "horovod" not in registry.available_strategies():
        registry.register("horovod", strategy, description="Horovod's ranks (Hora)")
    return strategy


class _Horovod:
    """Trains on the ranks of `hvd`: multiplies the learning rate by their number, broadcasts rank 0's parameters.

    In an elastic job `fit` survives the loss and arrival of ranks; for `new_data` see `make_elastic`.
    """

    # Attributes of Lightning's class, before which this one is mixed in.
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[Any]
    parallel_devices: list[torch.device] | None
    model: Any
    strategy_name = "horovod"
    is_distributed = True  # by default Lightning shards the data over the ranks

    def __init__(self, *args: Any, new_data: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hvd.init()
        self._new_data = new_data
        self._accumulating = False
        self.apply_rank()

    def apply_rank(self) -> None:
        """Make Lightning print and write only on rank 0."""
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
        """Return the only device, or that of the local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank if self.local_rank < len(devices) else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # ---- training ----------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """Scale the learning rates by the number of ranks, broadcast rank 0's state, and wrap the optimizers."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.scale_rates(hvd.size())
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._wrap(trainer)
        if is_elastic():
            make_elastic(trainer, self._new_data)

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate, including the initial rates of schedulers."""
        for group in self.groups():
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for config in self.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [rate * factor for rate in config.scheduler.base_lrs]

    def _wrap(self, trainer: Any) -> None:
        """Wrap every optimizer in a distributed one with only its own parameters, and update its schedulers."""
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
        """Wait for the averages before Lightning reads the gradients, unless gradients are still being accumulated."""
        for optimizer in self.optimizers:
            if not self._accumulating and optimizer._backward_seen_since_step():  # type: ignore[attr-defined]
                optimizer.synchronize()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Only accumulate gradients in backward passes inside this context."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step without synchronizing: Lightning's closure runs backward and has synchronized already."""
        bare: Any = getattr(optimizer, "_optimizer", optimizer)
        with bare.skip_synchronize():
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for the others; the ranks keep running."""
        if not is_elastic():  # elastic ranks end the training together and may then exit one by one
            self.barrier()
        self.cluster_environment = None
        for kind in type(self).__mro__:
            if kind.__name__ == "Strategy":
                kind.teardown(self)  # type: ignore[attr-defined]  # the parallel strategy's clears other variables
                return

    # ---- collectives -------------------------------------------------------------------------------------------------

    @property
    def _single_process(self) -> bool:
        """True if there is no rank to wait for: a rank that has raised cleans up while the others still train."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return hvd.size() == 1 or (trainer is not None and bool(trainer.interrupted))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks: `mean` (or `avg`, None), `sum`, `max` or `min`."""
        if group is not None:
            raise ValueError("the Horovod strategy does not support process groups: hvd uses process sets")
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
        """Return all ranks' tensors along a new first dimension; with one rank, the tensor itself."""
        if group is not None:
            raise ValueError("the Horovod strategy does not support process groups: hvd uses process sets")
        if self._single_process:
            return tensor
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            return hvd.allgather(tensor.unsqueeze(0).contiguous())

    def barrier(self, name: str | None = None) -> None:
        if not self._single_process:
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._single_process else hvd.broadcast_object(obj, root_rank=src)
