"""A persistent reduction: the same reduction of the same memory in every step, set up once by all members together.

The optimizer's buckets `start` it when their data is in place, and `wait` for it. It is executed in a lane, without being
announced (`lane`): `SharedMemoryReduction` on one host, `HostReduction` over several. Where the lane finds it void, all
members announce it, and their queue executes it when they have agreed, also on a rank that has joined and has not
started it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.lane import Item, Lane
from hora.engine.request import Kind, Reduce, Request, Signature, dtype_name, full_names

__all__ = ["PersistentReduction"]


class PersistentReduction:
    """`mine` is this rank's data, and the result of an allreduce in place; `out`: where the result is otherwise.

    All members must have made it before one starts it. In a step: idle --`start`--> in flight --`wait`--> idle.
    """

    def __init__(
        self,
        lane: Lane,
        kind: Kind,
        mine: torch.Tensor,
        *,
        name: str,
        reduce: Reduce,
        out: torch.Tensor | None = None,
    ) -> None:
        self.lane = lane
        self.out = out
        self.num_bytes = mine.nbytes
        self.signature = Signature(
            int(kind),
            kind.name.lower(),
            name,
            (dtype_name(mine.dtype),),
            ((mine.numel(),),),
            reduce.op,
            reduce.prescale,
            reduce.postscale,
            bound=True,
            code=reduce.code,
        )
        self._name = name
        self._mine = mine
        self._index = lane.add(self)
        self._started: Item | None = None

    @property
    def in_flight(self) -> bool:
        """Return whether it was started and not yet waited for."""
        return self._started is not None

    @property
    def done(self) -> bool:
        """Return whether it was started and `wait` would return at once."""
        return self._started is not None and self._started.done

    def start(self, *, background: bool) -> None:
        """This rank's data is in its place: reduce it. Without `background` only `wait` drives it."""
        if self._started is not None and not self._started.done:
            raise ValueError(
                "a tensor with the same name as another tensor that is still being processed was submitted: "
                f"{full_names(*self.signature.key(0), 1)[0]}; give it another name or synchronize the first one"
            )
        self._started = self.lane.start(self._index, background=background)

    def wait(self) -> torch.Tensor:
        """The result, when it is there. What was not started is started here."""
        if self._started is None:
            self.start(background=False)
        started, self._started = self._started, None
        assert started is not None, self._name
        self.lane.wait(started)
        return self._mine if self.out is None else self.out

    def release(self) -> None:
        """Let the engine forget it, and the lane with all that is in it; the memory goes with the last view of it."""
        self.lane.queue.bound.pop(self._name, None)
        self.lane.close()

    def execute_announced(self, number: int) -> None:
        """Have all members agree on it, and wait until it is done."""
        request = Request(self.signature, (self._mine,))
        self.lane.queue.submit(request, background=False)
        self.lane.queue.result(request)

    def execute_direct(self, number: int, absent: Sequence[int]) -> bool:
        """Execute item `number` of the lane, for which the members in `absent` have joined. True when it is done, False
        when it is void: then nothing was changed, every member finds the same, and the lane has it announced."""
        return False
