"""Gradient reduction with one request per parameter or group: the general path.

It handles the first step of every optimizer, groups, sparse gradients, user compressors and unusual reduce ops.
`Buckets` and `Shards` are faster for the common cases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hora import engine
from hora.engine.request import Kind
from hora.torch.ops import sparse_allreduce_async
from hora.torch.optimizer.parameters import no_rows
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, summed
from hora.torch.optimizer.turns import turn

Parameter = torch.Tensor


@dataclass(slots=True)
class _Unit:
    """Parameters that are reduced together, and how many of them are ready in this step."""

    name: str
    parameters: Sequence[Parameter]
    num_ready: int = 0


class PerParameterReducer(Reducer):
    """Sends one request per parameter; with `groups`, one grouped request per group.

    A rank without a gradient cannot tell whether the others' gradient is sparse. Until the ranks agree on every layout,
    sparse and missing gradients wait for the agreement in `finish`. With `sparse` the layouts are already agreed on.
    """

    def __init__(
        self,
        options: ReduceOptions,
        parameters: Sequence[Parameter],
        groups: Sequence[Sequence[Parameter]] = (),
        *,
        sparse: Sequence[Parameter] | None = None,
    ) -> None:
        self._options = options
        names = options.names
        self._units: dict[Parameter, _Unit] = {}
        self._submitted: list[Callable[[], None]] = []  # each waits for a reduction and takes its results
        self._waiting: list[_Unit] = []
        self._lent: dict[Parameter, tuple[int, weakref.ref[np.ndarray]]] = {}  # where the user's gradients lie
        self._layouts_agreed = sparse is not None or options.sparse_as_dense
        self.sparse: set[Parameter] = set(sparse or ())  # a missing gradient of these is sparse and empty
        managed = set(parameters)
        grouped = [[parameter for parameter in group if parameter in managed] for group in groups]
        alone = managed.difference(*grouped)
        for members in [*filter(None, grouped), *([parameter] for parameter in parameters if parameter in alone)]:
            name = names[members[0]] + (f"+{len(members) - 1}" if len(members) > 1 else "")
            self._units.update(dict.fromkeys(members, _Unit(name, members)))

    def ready(self, parameter: Parameter) -> None:
        unit = self._units[parameter]
        unit.num_ready += 1
        if unit.num_ready == len(unit.parameters):
            unit.num_ready = 0
            if self._layouts_agreed or all(p.grad is not None and not p.grad.is_sparse for p in unit.parameters):
                self._submitted.append(self._start(unit))
            else:
                self._waiting.append(unit)

    def finish(self) -> None:
        if not self._layouts_agreed:
            try:
                with turn(self._options, sorted(self._units, key=self._options.names.__getitem__)):
                    self._agree_on_layouts()
            except BaseException:
                self._submitted, self._waiting = [], []  # ranks that disagree would wait for one another
                raise
        submitted, self._submitted = self._submitted, []
        first_error: Exception | None = None
        for finish in submitted:
            try:
                finish()
            except Exception as error:  # every handle must be collected, even if another fails
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _agree_on_layouts(self) -> None:
        """Find the gradients that are sparse on any rank (collective), and submit those that waited for it."""
        parameters = sorted(self._units, key=self._options.names.__getitem__)
        gradients = [parameter.grad for parameter in parameters]
        size = self._options.num_members
        # Each member adds 1 to the count; a missing gradient adds 0, a dense one 1, a sparse one more than all dense
        # ones.
        ballot = [1, *(0 if g is None else size + 1 if g.is_sparse else 1 for g in gradients)]
        name = "optimizer.layouts (1 + number of parameters)"  # shown by a mismatch error
        num_members, *sums = summed(ballot, self._options, name)
        self.sparse |= {parameter for parameter, total in zip(parameters, sums, strict=True) if total > size}
        self._layouts_agreed = num_members == size and all(sums)  # a joined rank has no layouts yet
        waiting, self._waiting = self._waiting, []
        self._submitted += [self._start(unit) for unit in waiting]

    def _start(self, unit: _Unit) -> Callable[[], None]:
        """Start reducing the gradients of a unit; returns a function that waits and puts the results back."""
        options = self._options
        tensors: list[torch.Tensor] = []
        put_back: list[Callable[[torch.Tensor], None]] = []
        sparse: list[tuple[Parameter, Callable[[], torch.Tensor]]] = []
        code = options.code_for(unit.parameters)
        for parameter in unit.parameters:
            if self._reduces_sparse(parameter):
                gradient, name = parameter.grad, options.names[parameter]
                assert gradient is not None, name
                reduced = sparse_allreduce_async(gradient, name=name, op=options.op, process_set=options.process_set)
                sparse.append((parameter, reduced))
            else:
                tensor, give_back = self._prepare(parameter, compress=not code)
                tensors.append(tensor)
                put_back.append(give_back)
        request = None
        if tensors:
            request = engine.current_runtime().submit(
                Kind.ALLREDUCE,
                tensors,
                outputs=tensors,
                name=unit.name,
                grouped=len(unit.parameters) > 1,
                reduce=options.reduce._replace(code=code),
                process_set_id=options.process_set_id,
            )

        def finish() -> None:
            if request is not None:
                for give_back, tensor in zip(put_back, request.result(), strict=True):
                    give_back(tensor)
            for parameter, reduced in sparse:
                parameter.grad = reduced()

        return finish

    def _reduces_sparse(self, parameter: Parameter) -> bool:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            self.sparse.add(parameter)
        elif gradient is None and parameter in self.sparse:
            parameter.grad = no_rows(parameter)
        else:
            return False
        return not self._options.sparse_as_dense

    def _prepare(self, parameter: Parameter, *, compress: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
        """Return the tensor to reduce, and a function that makes its result the gradient."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        tensor, context = parameter.grad.detach(), None
        was_sparse = tensor.is_sparse
        if was_sparse:
            tensor = tensor.to_dense()
        if compress:
            tensor, context = self._options.compression.compress(tensor.contiguous())

        def put_back(reduced: torch.Tensor) -> None:
            result = self._options.compression.decompress(reduced, context) if compress else reduced
            if was_sparse:
                parameter.grad = result.to_sparse(1 if result.dim() else 0)
            elif parameter.grad is None:  # the user dropped it meanwhile
                parameter.grad = result
            elif result.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.detach().copy_(result)

        tensor = tensor.contiguous()
        if tensor.device.type == "cpu" and tensor.numel() and not was_sparse:
            tensor = self._owned(parameter, tensor)
        return tensor, put_back

    def _owned(self, parameter: Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of `tensor` on a storage that the user cannot move while it is reduced.

        If it is the gradient's memory, the gradient gets another storage of the same memory.
        """
        gradient = parameter.grad
        if type(gradient) is not torch.Tensor or gradient.data_ptr() != tensor.data_ptr():
            return tensor
        address, memory = self._lent.get(parameter, _NOTHING)
        known = memory()
        if known is not None and address == tensor.data_ptr() and known.nbytes == tensor.nbytes:
            return _on_own_storage(known, tensor)
        lent = (tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.view(-1).view(torch.uint8)).numpy()
        gradient.data = _on_own_storage(lent, tensor)
        self._lent[parameter] = tensor.data_ptr(), weakref.ref(lent)
        return tensor


_KNOWN_TO_NUMPY = (torch.float32, torch.float64, torch.float16)
_NOTHING: tuple[int, Callable[[], np.ndarray | None]] = (0, lambda: None)


def _on_own_storage(memory: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.from_numpy(memory)
    return tensor if like.dtype in _KNOWN_TO_NUMPY else tensor.view(like.dtype).view(like.shape)
