"""Protected models: DDP's buckets become protected calls, and its forward passes mark where steps begin.

DDP's hook for communication gets every bucket when its gradients are complete. The bucket's mean goes to memory beside
it. So the bucket keeps this rank's own gradients until the next pass, and the mean outlives the step: a rank that
missed it copies it from there. DDP waits for the buckets in a callback at the end of backward; ours, which precedes it,
has waited for them by then, in as many worlds as it took. So the gradients are whole when `backward()` returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hora.torch.distributed.work import DONE, Work
from hora.torch.protection.calls import Call
from hora.torch.protection.protection import Protection

_FIRST_WITH_FINAL_BUCKETS = 3  # DDP rebuilds them before its second pass


class ProtectedModel:
    """A DDP model whose buckets are protected. `on_begin` is called before each of its training passes."""

    def __init__(self, model: DistributedDataParallel, protection: Protection, on_begin: Callable[[], None]) -> None:
        self.model, self._protection, self._on_begin = model, protection, on_begin
        self.on_rows: Callable[[int], object] = int  # told the number of rows of each of these passes, too
        self.num_passes = 0
        self._means: dict[tuple[int, int], torch.Tensor] = {}  # by bucket and size
        self._waiting: list[tuple[Call, Future[torch.Tensor]]] = []
        self._backward = -1  # the pass of autograd whose end is awaited

    def hook(self) -> None:
        """Attach to the model."""
        # DDP compares the annotations of a hook with its classes, not with their names.
        self.model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        self.model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    @property
    def has_final_buckets(self) -> bool:
        """Return whether the buckets of the next pass are those of all later ones."""
        return self.num_passes >= _FIRST_WITH_FINAL_BUCKETS - 1

    def before_forward(self, model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        """Called before each pass of the model."""
        if is_training_pass(model):
            tensors = (value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor) and value.dim())
            first = next(tensors, None)
            self._on_begin()
            self.on_rows(0 if first is None else first.shape[0])
            self.num_passes += 1

    def _reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        source = bucket.buffer()
        mean = self._mean(bucket.index(), source)
        group = self._protection.group
        future: Future[torch.Tensor] = Future(devices=[source.device] if source.is_cuda else None)
        call = Call(lambda: group.average(source, mean), [mean])
        self._waiting.append((call, future))
        self._protection.start(call)
        backward = torch._C._current_graph_task_id()
        if backward < 0 or (self.model.static_graph and self.num_passes <= 1):
            self._finish_backward()  # DDP reduces the first pass of a static graph after it, and waits at once
            return future
        if call.work is not None:
            group.go_on_in_background()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        return future

    def _mean(self, index: int, source: torch.Tensor) -> torch.Tensor:
        key = index, source.numel()
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = torch.empty_like(source)
        return mean

    def _finish_backward(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call, future in waiting:
            self._protection.finish(call)
            future.set_result(call.results[0])

    # For newcomers.

    def buckets(self) -> list[list[int]]:
        """Return the numbers of the parameters in each bucket."""
        numbers = {p: number for number, p in enumerate(self._parameters())}
        reducer: Any = self.model.reducer
        return [[numbers[p] for p in bucket.parameters()] for bucket in reducer._get_zeros_like_grad_buckets()]

    def adopt_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        """Give DDP these buckets, as if it had found them in its first pass and agreed on them with the others."""
        group: Any = self._protection.group
        numbers = [*(number for bucket in buckets for number in bucket), len(buckets)]
        answers = iter((numbers, [len(bucket) for bucket in buckets]))

        def broadcast(tensors: Sequence[torch.Tensor], options: Any) -> Work:
            tensors[0].copy_(torch.tensor(next(answers), dtype=tensors[0].dtype, device=tensors[0].device))
            return DONE

        reducer: Any = self.model.reducer
        reducer._push_all_rebuilt_params()
        group.broadcast = broadcast  # C++ asks the group; a model that never rebuilds its buckets does not
        try:
            reducer._rebuild_buckets()
        finally:
            del group.broadcast
        if self.buckets() != [list(bucket) for bucket in buckets]:
            raise RuntimeError(f"DDP has the buckets {self.buckets()} here, but the other ranks have {buckets}")

    def _parameters(self) -> list[torch.nn.Parameter]:
        ignored = self.model.parameters_to_ignore
        return [p for name, p in self.model.module.named_parameters() if p.requires_grad and name not in ignored]


def is_training_pass(model: torch.nn.Module) -> bool:
    """Return whether a pass of this DDP model that begins now is one of training.

    Lightning leaves the model itself in the mode of the last validation, and sets that of the module inside.
    """
    return torch.is_grad_enabled() and (model.training or getattr(model, "module", model).training)


def digest_of(models: Sequence[DistributedDataParallel], optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return a text that ranks with the same models and optimizers have, and that says how large they are."""
    digest, num_tensors, num_elements = hashlib.sha256(), 0, 0
    for model in models:
        for name, tensor in model.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                num_tensors, num_elements = num_tensors + 1, num_elements + tensor.numel()
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
    for optimizer in optimizers:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        digest.update(f"{type(optimizer).__name__} {sizes}\n".encode())
    return f"{len(models)} model(s) of {num_tensors} tensors with {num_elements} numbers, {digest.hexdigest()[:8]}"
