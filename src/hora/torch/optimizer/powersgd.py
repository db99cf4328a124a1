"""PowerSGD: low-rank factors of gradients and the residual they leave (arXiv 1905.13727).

A gradient M of n rows and m columns is sent as P = M Q (n x rank) and Q = Mᵀ P (m x rank), each summed over the ranks.
P is orthonormalized in between, and every rank uses P Qᵀ as the gradient. Both products are linear in M. So summing the
factors of a host's ranks, as every allreduce does, compresses once per host. This module only computes; `low_rank`
communicates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hora.torch.compression import PowerSGD
from hora.world import World


def working_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of factors and residuals: float32 also for half precision."""
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def orthonormalise_(matrix: torch.Tensor) -> None:
    """Replace the columns with an orthonormal basis of their span; a column of zeros becomes a unit vector."""
    matrix.copy_(torch.linalg.qr(matrix)[0])


class PowerSGDMemory:
    """State per parameter: the factor Q of the last step, equal on all ranks, and this rank's residual."""

    def __init__(self, settings: PowerSGD, names: Mapping[Any, str] | None = None) -> None:
        self.settings, self._names = settings, {} if names is None else names
        self.num_steps = 0
        self.num_joins = 0
        self.amid = False  # inside a step: residuals include gradients that are not applied yet
        self._factors: dict[torch.Tensor, torch.Tensor] = {}
        self._errors: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def due(self) -> bool:
        """Return whether the next step is compressed."""
        return self.num_steps >= self.settings.start_step

    def rank_of(self, parameter: torch.Tensor) -> int:
        """Return the rank of a parameter's factors; 0 if it is sent uncompressed."""
        if parameter.dim() < 2 or not parameter.numel():
            return 0
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        rank = min(rows, columns, self.settings.rank)
        worth_it = (rows + columns) * rank * self.settings.min_compression_rate < rows * columns
        return rank if worth_it else 0

    def factors(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the factors Q of these parameters (all compressed ones); draws new ones unless all have one."""
        shapes = {p: (p.numel() // p.shape[0], self.rank_of(p)) for p in parameters}
        if any(p not in self._factors or self._factors[p].shape != shapes[p] for p in parameters):
            generator = torch.Generator("cpu").manual_seed(self.settings.seed)
            order = list(dict.fromkeys(p.shape for p in parameters))
            for p in sorted(parameters, key=lambda p: order.index(p.shape)):
                drawn = torch.randn(shapes[p], generator=generator, dtype=working_dtype(p), device="cpu")
                self._factors[p] = drawn.to(p.device)
        return [self._factors[parameter] for parameter in parameters]

    def error(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's gradients of a parameter that has not been sent yet."""
        if parameter not in self._errors:
            self._errors[parameter] = torch.zeros(
                parameter.shape, dtype=working_dtype(parameter), device=parameter.device
            )
        return self._errors[parameter]

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Zero the residuals and draw new factors in the next step, for all or the given parameters."""
        for parameter in list(self._errors) if parameters is None else parameters:
            self._errors[parameter].zero_()
            self._factors.pop(parameter, None)

    def agree(self, summed: Callable[[list[int]], list[int]], num_members: int) -> None:
        """Agree with the other members on the number of steps and on whether all have the same factors (collective).

        A newcomer has made one step and has no factors. Survivors of a reset keep their count and draw new factors with
        the newcomer.
        """
        if self.amid:  # the world ended inside a step, which will be repeated
            self.amid = False
            self.forget()
        digest = self._digest()
        known = self.num_steps > 1
        num_known, steps, digests = summed([known, self.num_steps if known else 0, digest])
        if num_known:
            self.num_steps = steps // num_known
        if digests != digest * num_members:
            self._factors.clear()

    def _digest(self) -> int:
        if not self._factors:
            return 0
        content = hashlib.sha256()
        for parameter in sorted(self._factors, key=self._names.__getitem__):
            content.update(self._factors[parameter].cpu().numpy().tobytes())
        return int.from_bytes(content.digest()[:5], "little")

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return step count, factors, and this rank's residuals with its rank and world size, which they depend on."""
        return {
            "num_steps": self.num_steps,
            "factors": {self._names[p]: factor for p, factor in self._factors.items()},
            "errors": {self._names[p]: error for p, error in self._errors.items()},
            "place": [world.rank, world.size],
        }

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Load a state; residuals only if they are this rank's own, from a world of the same size."""
        self.num_steps = int(state["num_steps"])
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._factors = _loaded(state["factors"], parameters)
        errors = _loaded(state["errors"], parameters) if list(state["place"]) == [world.rank, world.size] else {}
        for parameter, error in self._errors.items():  # in place: a reducer may hold it
            found = errors.pop(parameter, None)
            error.zero_() if found is None or found.shape != error.shape else error.copy_(found)
        self._errors.update({p: error for p, error in errors.items() if error.shape == p.shape})


def _loaded(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    pairs = [(parameters[name], tensor) for name, tensor in tensors.items() if name in parameters]
    return {p: tensor.detach().to(p.device, working_dtype(p), copy=True) for p, tensor in pairs}
