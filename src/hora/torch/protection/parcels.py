"""Tensors and values on their way from one rank of a group to the others, in one go."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions

from hora.torch.distributed.group import HoraProcessGroup


class _Place:
    """Stands for the n-th tensor in a value."""

    def __init__(self, number: int, like: torch.Tensor) -> None:
        self.number, self.shape, self.dtype, self.device = number, like.shape, like.dtype, like.device.type


def send(group: HoraProcessGroup, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Overwrite tensors with those of the group's member `root` (collective)."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    for tensor in tensors:
        type(group).broadcast(group, [tensor.detach()], options).wait()


def send_value(group: HoraProcessGroup, value: Any, root: int) -> Any:
    """Return the root's value (collective): large tensors travel as they are, the rest is pickled.

    The members of a group are authenticated, so what they send may be unpickled.
    """
    tensors: list[torch.Tensor] = []
    if group.rank() == root:
        value, buffer = _without(value, tensors), io.BytesIO()
        torch.save(value, buffer)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    length = torch.tensor([data.numel() if group.rank() == root else 0], device="cpu")
    send(group, [length], root)
    if group.rank() != root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    send(group, [data], root)
    if group.rank() != root:
        value = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=False)
    return _with(value, group, tensors, root)


def _without(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of a state dict with a place instead of each tensor, which is appended to `tensors`."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach().contiguous())
        return _Place(len(tensors) - 1, value)
    if type(value) in (list, tuple):
        return type(value)(_without(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: _without(item, tensors) for key, item in value.items()}
    return value


def _with(value: Any, group: HoraProcessGroup, tensors: list[torch.Tensor], root: int) -> Any:
    """Return the value with its tensors, which are sent in the order of their places."""
    if isinstance(value, _Place):
        device = torch.device("cuda", torch.cuda.current_device()) if value.device == "cuda" else value.device
        tensor = tensors[value.number] if tensors else torch.empty(value.shape, dtype=value.dtype, device=device)
        send(group, [tensor], root)
        return tensor
    if type(value) in (list, tuple):
        return type(value)(_with(item, group, tensors, root) for item in value)
    if isinstance(value, dict):
        return {key: _with(item, group, tensors, root) for key, item in value.items()}
    return value
