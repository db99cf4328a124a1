"""Rollback to the last step: how training continues after a failure with its current state instead of a copy.

Steps need no votes while nothing fails. Sum n completes only after every rank has contributed its gradient, which a
rank does after it has applied step n - 1. So when the world breaks, the last step that every survivor has applied is n
or n - 1:

    step n applied by no survivor    the next world repeats the step
    step n applied by some           in the next world every rank announces its step number, and a rank that missed
                                     the step copies the state from a rank that has it (`TorchState.sync`)

The changes that a step makes before it is applied are rolled back if it fails: gradients, buffers (running statistics
of batch normalization), the state's plain values, and torch's random generators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase


class LastStep:
    """Number of the last applied step, and the buffers and random generators at its end.

    without a state (-1) --sync--> at rest --a gradient--> begun --applied or skipped--> at rest
                                      ^                      |
                                      +------rolled back-----+
    """

    def __init__(self) -> None:
        self.number = -1
        self.begun = False
        self.rolled_back = False  # generators follow once it is known that no other rank has applied the step
        self._buffers: list[_Buffer] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def watch(self, modules: Iterable[torch.nn.Module], generators: Sequence[torch.Generator]) -> None:
        """Track the buffers of these modules, these generators, and the generators of the modules' devices."""
        unique = dict.fromkeys(part for module in modules for part in module.modules())
        self._buffers = [_Buffer(part, name) for part in unique for name in part._buffers]
        gpus = {p.device for part in unique for p in part.parameters(recurse=False) if p.device.type == "cuda"}
        indices = sorted(torch.cuda.current_device() if gpu.index is None else gpu.index for gpu in gpus)
        defaults = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
        self._generators = [(generator, generator.get_state()) for generator in [*defaults, *generators]]
        self.remember()

    def remember(self) -> None:
        """Record the current buffers and generators. Copies only what has changed."""
        for buffer in self._buffers:
            buffer.remember()
        self._generators = [(generator, generator.get_state()) for generator, _ in self._generators]

    def roll_back(self) -> None:
        """Restore the buffers to their values at the end of the last step."""
        for buffer in self._buffers:
            buffer.roll_back()
        self.begun, self.rolled_back = False, True

    def roll_back_generators(self) -> None:
        """Restore the generators likewise, once, after `roll_back`."""
        if self.rolled_back:
            for generator, state in self._generators:
                generator.set_state(state)
        self.rolled_back = False


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

    def roll_back(self) -> None:
        tensor, kept = self._tensor, self._copy
        if tensor is None or kept is None:
            return
        if self._unseen or tensor is not self._module._buffers.get(self._name) or tensor._version != self._version:
            with torch.no_grad():
                tensor.copy_(kept)
            self._module._buffers[self._name] = tensor
            self._version = tensor._version
