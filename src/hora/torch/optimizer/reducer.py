"""Base of gradient reducers, the user's options, and a reduction that is requested anew in each step.

`PerParameterReducer`, `Buckets` and `Shards` are the reducers. If the members share memory, a bucket holds the engine's
`PersistentReduction`, otherwise a `RequestedReduction` with the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hora import engine
from hora.engine.request import Kind, Reduce, ReduceOp, Request
from hora.engine.schedule import PersistentReduction
from hora.engine.transport.arithmetic import HALVES
from hora.torch.compression import Compressor, ErrorFeedback, Int8Compressor, NoneCompressor, code_for
from hora.torch.optimizer.powersgd import PowerSGDMemory
from hora.torch.process_sets import ProcessSet, registered_id


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Reduction settings of one optimizer."""

    process_set: ProcessSet
    names: dict[torch.Tensor, str] = field(default_factory=dict, compare=False)  # of the parameters, on all ranks
    op: int = ReduceOp.AVERAGE
    compression: type[Compressor] | Compressor = NoneCompressor
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    memory: PowerSGDMemory | None = None  # of the compression, if it has one

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
        """The reduction of every gradient."""
        factor = float(self.gradient_predivide_factor)
        return Reduce(self.op, 1.0 / factor, factor)

    def code_for(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the engine's encoding between hosts; empty if there is none or the compressor does the cast itself."""
        code = code_for(self.compression, tensors, op=self.op)
        return code if code and engine.current_runtime().spans_hosts(self.process_set_id) else ""

    def code_in_buckets(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the encoding with the mark of those whose error in one step is added in the next."""
        code = self.code_for(tensors)
        is_kept = isinstance(self.compression, ErrorFeedback) or self.compression is Int8Compressor
        return f"{code}+" if code and is_kept else code

    def early_scaling(self, dtype: torch.dtype) -> tuple[float, Reduce]:
        """Return the factor applied when gradients are copied, 1.0 for none, and the reduction that is left to do.

        The factor is the prescale, or a share of an average. An average becomes a sum only where that saves a pass and
        changes no bits except of numbers below 2^-126: over a power of two of members, without compression. Half
        precision, whose gradients are that small, is not scaled.
        """
        size, reduce = self.num_members, self.reduce
        if dtype in HALVES:
            return 1.0, reduce
        if self.compression is not NoneCompressor or self.gradient_predivide_factor != 1.0:
            return reduce.prescale, reduce._replace(prescale=1.0)
        if self.op == ReduceOp.AVERAGE and size > 1 and size & (size - 1) == 0:
            return 1.0 / size, reduce._replace(op=int(ReduceOp.SUM))
        return 1.0, reduce


class Reducer:
    """Takes gradients as they become ready and returns the reduced ones. This one has no peers and does nothing."""

    def ready(self, parameter: torch.Tensor) -> None:
        """Take the complete gradient of `parameter` (None contributes zeros)."""

    def note_missing(self) -> None:
        """Note that gradients did not arrive during backward; `ready` follows for them."""

    def finish(self) -> None:
        """Wait for all reductions, after `ready` for every parameter. Results are in `.grad` afterwards."""


class RequestedReduction:
    """A reduction of the same tensor in every step, used as a `PersistentReduction` is; an allreduce is in place."""

    out: torch.Tensor | None = None  # results of other kinds are new tensors

    def __init__(self, options: ReduceOptions, kind: Kind, tensor: torch.Tensor, *, name: str, reduce: Reduce) -> None:
        self._runtime, self._process_set_id = engine.current_runtime(), options.process_set_id
        self._kind, self._tensor, self._name, self._reduce = kind, tensor, name, reduce
        # The encoding error of one step is added in the next; of this rank's slice of its host.
        self._residuals = [torch.zeros_like(tensor)] if reduce.code.endswith("+") else []
        self._request: Request | None = None

    @property
    def in_flight(self) -> bool:
        return self._request is not None

    @property
    def done(self) -> bool:
        return self._request is not None and self._request.has_result

    def start(self, *, background: bool) -> None:
        self._request = self._runtime.submit(
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
        if self._request is None:
            self.start(background=False)
        request, self._request = self._request, None
        assert request is not None, self._name
        (result,) = request.result()
        return result

    def replace(self, tensor: torch.Tensor) -> None:
        """Reduce this tensor from now on."""
        self._tensor = tensor

    def release(self) -> None:
        """Do nothing: the engine keeps nothing between steps."""


Reduction = PersistentReduction | RequestedReduction


def summed(ballot: Sequence[int], options: ReduceOptions, name: str) -> list[int]:
    """Return the sum of the members' ballots (collective), by which ranks agree on something about gradients."""
    mine = torch.tensor(ballot, dtype=torch.int64, device="cpu")
    result: list[int] = engine.current_runtime().allreduce_(mine, name, set_id=options.process_set_id).tolist()
    return result
