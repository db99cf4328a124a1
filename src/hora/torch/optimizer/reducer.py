"""Base of all gradient reducers: the user's options, what the optimizer asks of a reducer, and a reduction
that is requested anew in each step.

`PerParameterReducer`, `Buckets` and `Shards` are the reducers. Where the members of the set share memory, a bucket
holds the engine's `PersistentReduction`; elsewhere it holds a `RequestedReduction`, which is used in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hora import engine
from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.transport.arithmetic import HALVES
from hora.torch.compression import Compressor, NoneCompressor, code_for
from hora.torch.optimizer.powersgd import PowerSGDMemory
from hora.torch.process_sets import ProcessSet, registered_id

__all__ = ["ReduceOptions", "Reducer", "RequestedReduction", "summed"]


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Reduction settings of one optimizer's gradients."""

    process_set: ProcessSet
    op: int = ReduceOp.AVERAGE
    compression: type[Compressor] | Compressor = NoneCompressor
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    memory: PowerSGDMemory | None = None  # of the compression, where it has one

    @property
    def process_set_id(self) -> int:
        return registered_id(self.process_set)

    @property
    def num_members(self) -> int:
        return self.process_set.size() or 1

    @property
    def member(self) -> int:
        """This rank's index in the process set."""
        member = self.process_set.rank()
        assert member is not None, self.process_set
        return member

    @property
    def reduce(self) -> Reduce:
        """Return the reduction of every gradient."""
        factor = float(self.gradient_predivide_factor)
        return Reduce(self.op, 1.0 / factor, factor)

    def code_for(self, tensors: Sequence[torch.Tensor]) -> str:
        """The engine's code for transfers between hosts; empty if the compressor does it itself, or there is none."""
        code = code_for(self.compression, tensors, op=self.op)
        return code if code and engine.current_runtime().spans_hosts(self.process_set_id) else ""

    def early_scale(self, dtype: torch.dtype) -> float:
        """Return the factor applied to gradients when they are copied, so that a sum gives the average; 1.0: nothing.

        Only where it saves a pass and changes a bit of nothing but the smallest numbers (below 2^-126): Average over a
        power of two of members, without compression, and not of half precision, where gradients are that small.
        """
        size = self.num_members
        plain = self.compression is NoneCompressor and self.gradient_predivide_factor == 1.0 and dtype not in HALVES
        return 1.0 / size if plain and self.op == ReduceOp.AVERAGE and size & (size - 1) == 0 else 1.0

    def reduce_after_early_scale(self, dtype: torch.dtype) -> Reduce:
        """`reduce` for gradients that were multiplied with `early_scale`."""
        return self.reduce if self.early_scale(dtype) == 1.0 else self.reduce._replace(op=int(ReduceOp.SUM))


class Reducer(Protocol):
    """The interface that the optimizer uses: told which gradients are ready, it gives back the reduced ones."""

    def ready(self, parameter: torch.Tensor) -> None:
        """The gradient of `parameter` is complete on this rank (None: it takes part with zeros)."""

    def note_missing(self) -> None:
        """Some gradients have not arrived during backward; `ready` is about to be called for them."""

    def finish(self) -> None:
        """Wait for all reductions; every parameter was `ready` before. Results are in `.grad` afterwards."""


class RequestedReduction:
    """A reduction of the same tensor in every step; an allreduce works in place. To be used as a `PersistentReduction`.

    `keeps_losses`: what the code of `reduce` loses in one step is added in the next.
    """

    def __init__(
        self,
        runtime: engine.Runtime,
        kind: Kind,
        tensor: torch.Tensor,
        *,
        name: str,
        reduce: Reduce,
        process_set_id: int,
        keeps_losses: bool = False,
    ) -> None:
        self._runtime = runtime
        self._residuals = [torch.zeros_like(tensor)] if keeps_losses else []  # of what this rank sends for its host
        self._kind = kind
        self._tensor = tensor
        self._name = name
        self._reduce = reduce._replace(code=f"{reduce.code}+") if keeps_losses else reduce
        self._process_set_id = process_set_id
        self._handle: int | None = None

    @property
    def in_flight(self) -> bool:
        return self._handle is not None

    @property
    def done(self) -> bool:
        return self._handle is not None and self._runtime.poll(self._handle)

    def start(self, *, background: bool) -> None:
        self._handle = self._runtime.submit(
            self._kind,
            [self._tensor],
            outputs=[self._tensor] if self._kind is Kind.ALLREDUCE else None,
            name=self._name,
            reduce=self._reduce,
            process_set_id=self._process_set_id,
            residuals=self._residuals,
            background=background,
        )

    def wait(self) -> torch.Tensor:
        if self._handle is None:
            self.start(background=False)
        handle, self._handle = self._handle, None
        assert handle is not None, self._name
        (result,) = self._runtime.synchronize(handle)
        return result


def summed(ballot: torch.Tensor, options: ReduceOptions, name: str) -> list[int]:
    """The members' ballots added up (collective): how the ranks agree on something about gradients."""
    set_id = options.process_set_id
    result: list[int] = engine.current_runtime().allreduce_(ballot, name, set_id=set_id).tolist()
    return result
