"""The last step: how a training goes on after a death with what it has, instead of going back to a copy of it.

Nothing is voted on while all goes well. Sum number n exists anywhere only when every rank has given its gradient to it,
and a rank does that after it has applied step n - 1. So when the world breaks, every survivor has applied step n, or
step n - 1 as its last:

    step n applied by no survivor    it has happened nowhere; the next world makes it again
    step n applied by some           when the next world meets every rank tells its number, and a rank that lacks the
                                     step takes the state from one that has it, before any goes on (`TorchState.sync`)

What a step changes before it is applied is little, and is taken back if it fails: gradients, buffers (running
statistics of batch normalisation), the state's plain values, torch's random generators.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["LastStep", "copied"]

_IMMUTABLE = frozenset((int, float, bool, str, bytes, type(None)))


def copied(value: Any) -> Any:
    """A deep copy, at no cost for what cannot change."""
    return value if type(value) in _IMMUTABLE else copy.deepcopy(value)


class LastStep:
    """Number of the last step that was applied, and how buffers and random generators were when it ended.

    without a state (-1) --sync--> at rest --a gradient--> begun --applied or left out--> at rest
                                      ^                      |
                                      +------taken back------+
    """

    def __init__(self) -> None:
        self.number = -1
        self.begun = False
        self.taken_back = False  # generators follow when it is known that no other rank has applied the step
        self._buffers: list[_Buffer] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def watch(self, modules: Iterable[torch.nn.Module], generators: Sequence[torch.Generator]) -> None:
        """Remember the buffers of these modules from now on, these generators, and those of the modules' devices."""
        unique = dict.fromkeys(part for module in modules for part in module.modules())
        self._buffers = [_Buffer(part, name) for part in unique for name in part._buffers]
        gpus = {p.device for part in unique for p in part.parameters(recurse=False) if p.device.type == "cuda"}
        indices = sorted(torch.cuda.current_device() if gpu.index is None else gpu.index for gpu in gpus)
        defaults = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
        self._generators = [(generator, generator.get_state()) for generator in [*defaults, *generators]]
        self.remember()

    def remember(self) -> None:
        """Note the buffers and generators as they are now. Costs a copy of what has changed."""
        for buffer in self._buffers:
            buffer.remember()
        self._generators = [(generator, generator.get_state()) for generator, _ in self._generators]

    def take_back(self) -> None:
        """Give the buffers the values that they had when the last step ended."""
        for buffer in self._buffers:
            buffer.take_back()
        self.begun, self.taken_back = False, True

    def take_generators_back(self) -> None:
        """The same for the generators, once, after `take_back`."""
        if self.taken_back:
            for generator, state in self._generators:
                generator.set_state(state)
        self.taken_back = False


class _Buffer:
    """One buffer of a module, and a copy of it."""

    __slots__ = ("_copy", "_module", "_name", "_tensor", "_unseen", "_version")

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._unseen = isinstance(module, _NormBase)  # torch's kernels change these without a new version
        self._tensor: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        self._version = -1

    def remember(self) -> None:
        tensor = self._module._buffers.get(self._name)
        if tensor is None:
            self._tensor = self._copy = None
            return
        if tensor is not self._tensor or self._copy is None or self._copy.shape != tensor.shape:
            self._copy = tensor.detach().clone()
        elif self._unseen or tensor._version != self._version:
            self._copy.copy_(tensor.detach())
        self._tensor, self._version = tensor, tensor._version

    def take_back(self) -> None:
        tensor, kept = self._tensor, self._copy
        if tensor is None or kept is None:
            return
        if self._unseen or tensor is not self._module._buffers.get(self._name) or tensor._version != self._version:
            with torch.no_grad():
                tensor.copy_(kept)
            self._module._buffers[self._name] = tensor
            self._version = tensor._version
