"""`Calls`: what every call of a process group does: become requests of the engine, and wait for them.

A mix-in: the collectives derive from it, and know nothing of the class of torch that the group has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hora.engine import Runtime
from hora.engine.point_to_point import Message, Messages
from hora.engine.queue import OperationQueue
from hora.engine.request import CollectiveCall, Kind, Reduce, Request
from hora.errors import HorovodInternalError
from hora.torch.distributed.reductions import moved
from hora.torch.distributed.work import DONE, Work
from hora.torch.drift.data_parallel import Comparisons

ZERO, _NO_TIMEOUT = timedelta(0), timedelta(milliseconds=-1)
_SUM = Reduce()
SMALL_BYTES = 4 * 2**20  # so much is gathered or sent by all for one member, which takes one step
LastStep = Callable[[Request], object]  # the last step of a request (`Completion`)


class _Until:
    """A request with its deadline."""

    def __init__(self, request: Request, deadline: float) -> None:
        self._request, self._deadline = request, deadline
        self.name, self.key = request.name, request.key

    @property
    def done(self) -> bool:
        return self._request.done or time.monotonic() > self._deadline


class Calls:
    """This rank's calls of a group, numbered in call order."""

    _has_timed_out = False
    lacks_members = ""  # why the group has no members at present, if it has none

    def __init__(self, rank: int, size: int, runtime: Runtime, queue: OperationQueue, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()
        self._name = self._description = ""
        self._token = torch.zeros(1, dtype=torch.uint8, device="cpu")  # what a barrier reduces, or sends
        self._num_calls = 0
        self._labels: dict[str, str] = {}
        self.abort_hooks: dict[int, Callable[[], object]] = {}
        self.enter(rank, size, runtime, queue)

    def enter(self, rank: int, size: int, runtime: Runtime, queue: OperationQueue) -> None:
        """Become the same group's end in this world: its calls use this queue from now on."""
        self._rank, self._size = rank, size
        self._runtime, self._queue = runtime, queue
        self._ranks = queue.ranks
        self._own_rank = self._ranks[rank]  # in the job
        self._known: dict[object, Any] = {}
        self._has_timed_out = False
        self._messages: Messages = runtime.start_messages()
        self.comparisons = Comparisons(queue.process_set_id, self._finish_in_time)
        self._watched = self.comparisons.models

    @property
    def runtime(self) -> Runtime:
        """The world that its calls use."""
        return self._runtime

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members' ranks in the job."""
        return self._ranks

    @property
    def limit_s(self) -> float:
        """The group's timeout."""
        return self._limit_s

    def run_abort_hooks(self) -> None:
        """Tell the program that pending calls are about to be abandoned."""
        for hook in list(self.abort_hooks.values()):
            hook()

    def member_of(self, rank: int) -> int:
        return self._ranks.index(rank)

    # Waiting.

    def finish(self, part: Any, deadline: float, limit_s: float, *, ends_group: bool = True) -> None:
        """Wait for a request or a message of this group until the deadline; raises its error."""
        if isinstance(part, Message):
            if not part.done and not self._messages.wait(part, deadline):
                self._messages.cancel(part, self._late_message(part, limit_s))
            part.raise_error()
            if part.device_event is not None:
                part.device_event.wait()
            return
        queue = self._queue
        if not part.done:
            until = _Until(part, deadline)
            if not until.done:
                queue.wait(until)
            if not part.done:
                self._time_out(part, limit_s, ends_group=ends_group)
        queue.result(part)

    def _finish_in_time(self, request: Request) -> None:
        self.finish(request, time.monotonic() + self._limit_s, self._limit_s)

    def _time_out(self, request: Request, limit_s: float, *, ends_group: bool) -> None:
        """End a request and the group on this rank, or only this wait, with an error that names the missing ranks."""
        if ends_group:
            self._queue.waited_for = request.key  # before the other ranks ask, which have waited as long
        others = [rank for rank in self._ranks if rank != self._own_rank]
        absent = self._runtime.lines_of(others, self._queue.process_set_id, request.key)
        if request.done:
            return
        text = (
            f"rank {self._own_rank} waited {limit_s:g} s until the timeout in {request.name} for rank(s) "
            f"{list(absent)}: {listed(absent) or 'all ranks are in it'}. "
        )
        if not ends_group:
            raise HorovodInternalError(f"{text}You may wait for it again")
        text += "This process group cannot be used any more"
        self._has_timed_out = True
        self.run_abort_hooks()
        self._queue.abandon(text)

    def go_on_now(self) -> None:
        """Advance calls in flight as far as possible without waiting."""
        self._queue.go_on_now()

    def go_on_in_background(self) -> None:
        """Let a background thread drive calls in flight that no thread waits for."""
        if self._queue.in_flight:
            self._queue.wake_background()

    def _late_message(self, message: Message, limit_s: float) -> HorovodInternalError:
        peers = message.sources or [message.peer]
        verb = "send" if message.sources else "receive"
        lines = listed(self._runtime.lines_of(peers))
        return HorovodInternalError(
            f"rank {self._own_rank} waited {limit_s:g} s until the timeout for rank(s) {list(peers)} to "
            f"{verb} a message with tag {message.tag} in {self._label('messages')}: {lines}"
        )

    # Submitting.

    def _label(self, operation: str) -> str:
        """Return the operation's name with the group's, for the live page, timelines and messages."""
        found = self._labels.get(operation)
        if found is None:
            known = self._description not in ("", "undefined")
            found = f"{self._description if known else self._name or 'group'}/{operation}"
            if self._name:
                self._labels[operation] = found
        return found

    def _submit(
        self,
        operation: str,
        kind: Kind,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        *,
        wait: bool,
        reduce: Reduce = _SUM,
        root: int = -1,
        splits: Sequence[int] | None = None,
        grouped: bool = False,
        last: LastStep | None = None,
        targets: Sequence[Tensor] = (),
    ) -> Request:
        """Submit a request. `wait`: this thread will drive it at once; `last` writes `targets` (`Completion`)."""
        self._check_here()
        queue = self._queue
        request = queue.validator.request(CollectiveCall(kind, None, reduce, root, splits, grouped), tensors, outputs)
        request.signature = request.signature._replace(operation=self._label(operation))
        request.last, request.targets = last, targets
        queue.submit(request, background=not wait)
        return request

    def _check_here(self) -> None:
        self._num_calls += 1
        if self.lacks_members:
            raise HorovodInternalError(f"the process group {self._name!r} has no members: {self.lacks_members}")
        if not self._runtime.is_current:
            raise HorovodInternalError(
                f"the process group {self._name!r} of rank {self._own_rank} cannot be used here: it was "
                "destroyed, or this process was forked from the one that made it"
            )

    def _work(self, requests: Sequence[Request], tensors: Sequence[Any], opts: Any) -> Work:
        timeout = getattr(opts, "timeout", _NO_TIMEOUT)
        limit_s = timeout.total_seconds() if timeout > ZERO else self._limit_s
        work = Work(tensors, requests, self, limit_s)
        if waits(opts):
            work.wait()
            return DONE
        return work

    def _deal_out(self, operation: str) -> LastStep:
        """Return a last step that copies the gathered data of all members to the caller's tensors, if it has any."""

        def write(request: Request) -> None:
            if not request.targets:
                return
            whole, *received = outputs_of(request)
            views = [moved(target.detach()) for target in request.targets]
            sizes = [view.numel() for view in views]
            sent = received[0].tolist() if received else request.answer or sizes  # a repeated call has them agreed on
            if sizes != sent:
                raise ValueError(
                    f"{operation} on rank {self._own_rank}: the members sent {sent} elements, but the tensors for them "
                    f"have {sizes}: give each the size of its member's tensor"
                )
            for view, part in zip(views, whole.split(sizes), strict=True):
                view.copy_(part.view_as(view))

        return write


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be copied bytewise."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def tell_autograd(tensor: Tensor) -> None:
    """Count a write to a tensor, whose bytes the engine writes without autograd."""
    if not tensor.is_inference():
        increment_version(tensor)


def listed(lines: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} is at {line}" for rank, line in lines.items())


def waits(opts: Any) -> bool:
    """Return whether the caller waits for the result. If torch does not say, a background thread drives it."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def outputs_of(request: Request) -> list[Tensor]:
    assert request.outputs is not None
    return request.outputs
