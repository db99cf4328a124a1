"""`SendRecv`: messages from member to member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hora.engine.point_to_point import ANY_SOURCE, Message
from hora.engine.request import DTYPES
from hora.torch.distributed.calls import Calls, is_plain, tell_autograd
from hora.torch.distributed.reductions import moved
from hora.torch.distributed.work import DONE, Work

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}


class SendRecv(Calls):
    """send and recv, which match by tag and in order."""

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        self._check_peer("destination", dstRank)
        if self._move_now(self._messages.send_now, tensor, dstRank, tag):
            return DONE
        data = moved(tensor.detach()).cpu().resolve_neg().contiguous()
        return self._post(self._messages.send, data, self._ranks[dstRank], tag, [], tensors)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        self._check_peer("source", srcRank)
        tell_autograd(tensors[0])  # while the message is on its way
        done = Work(tensors)
        arrived = self._move_now(self._messages.receive_now, tensors[0], srcRank, tag)
        return done if arrived else self._receive(tensors, [self._ranks[srcRank]], tag)

    def _move_now(self, move: Callable[..., bool], tensor: Tensor, member: int, tag: int) -> bool:
        """Send or receive a message at once, if the ring has room for it or contains it."""
        kind = _DTYPE_CODES.get(tensor.dtype)
        if kind is None or not self._runtime.is_current or not is_plain(tensor):
            return False
        return move(self._ranks[member], self._queue.process_set_id, tag, kind, tensor.data_ptr(), tensor.nbytes)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        if self.lacks_members:
            self._check_here()
        tell_autograd(tensors[0])
        others = [rank for member, rank in enumerate(self._ranks) if member != self._rank]
        return self._receive(tensors, others, tag)

    def _receive(self, tensors: Sequence[Tensor], sources: Sequence[int], tag: int) -> Work:
        (tensor,) = tensors
        target = moved(tensor if is_plain(tensor) else tensor.detach())
        direct = target.is_cpu and target.is_contiguous() and not target.is_neg()
        data = (
            target if direct else torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=target.is_cuda)
        )
        peer = sources[0] if len(sources) == 1 else ANY_SOURCE
        last = None if direct else _copy_to(target, data)
        return self._post(self._messages.receive, data, peer, tag, sources, tensors, last)

    def _post(
        self,
        post: Callable[[Message], None],
        data: Tensor,
        peer: int,
        tag: int,
        sources: Sequence[int],
        tensors: Sequence[Tensor],
        last: Callable[[Message], object] | None = None,
    ) -> Work:
        self._check_here()
        memory = data.data_ptr(), data.nbytes
        message = Message(peer, self._queue.process_set_id, tag, memory, _DTYPE_CODES[data.dtype], data, sources)
        message.last, message.targets = last, tensors
        post(message)
        if not message.done:
            self._messages.go_on()  # in the background, while no thread waits for a message
        return Work(tensors, [message], self, self._limit_s)

    def _check_peer(self, what: str, member: int) -> None:
        if self.lacks_members:
            self._check_here()
        if not 0 <= member < self._size or member == self._rank:
            raise ValueError(
                f"rank {self._own_rank}: the {what} must be another member of the group, 0 to "
                f"{self._size - 1}, but it is {member}"
            )


def _copy_to(target: Tensor, data: Tensor) -> Callable[[Message], object]:
    """Return the last step of a message that arrives in another tensor: a GPU's data is copied on the caller's stream,
    without waiting for the GPU.
    """
    if not target.is_cuda:
        return lambda message: target.copy_(data)
    stream = torch.cuda.current_stream(target.device)

    def write(message: Message) -> None:
        with torch.cuda.stream(stream):
            target.copy_(data, non_blocking=True)
            message.device_event = stream.record_event()

    return write
