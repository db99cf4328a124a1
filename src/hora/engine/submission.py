"""Submission: how a request of this rank comes into flight. It is numbered, kept, and announced to the other members.

Any thread submits, under one lock. A thread that has the queue to itself (`lone`) says so in `alone`: then announcements are
kept back until it is done. It needs no lock for that, because it looks whether something is in flight after it has said so,
and a submission looks whether a thread is alone after it has put its request in flight.
"""

from __future__ import annotations

import threading

from hora.engine.agree.agreement import Agreement
from hora.engine.request import NUM_INSTANCES, Key, Request, Signature, full_names

__all__ = ["Submission"]


class Submission:
    """Of one queue. `numbers`: the next running number of unnamed requests, by operation."""

    def __init__(self, agreement: Agreement) -> None:
        self.lock = threading.Lock()
        self.in_flight: dict[Key, Request] = {}
        self.numbers: dict[str, int] = {}
        self.alone = False
        self._agreement = agreement
        self._kept_back: list[tuple[Signature, int]] = []  # what was submitted while a thread was alone

    def next_instance(self, signature: Signature) -> int:
        """The running number of the next request, used up herewith; 0 for one with a name. Under the lock."""
        if signature.name is not None:
            return 0
        instance = self.numbers.get(signature.operation, 0)
        self.numbers[signature.operation] = (instance + 1) % NUM_INSTANCES
        return instance

    def put(self, request: Request, instance: int | None) -> None:
        """Bring a request into flight, with its running number if it has one already. Under the lock."""
        signature = request.signature
        if instance is None:
            instance = self.next_instance(signature)
        key = signature.key(instance)
        if key in self.in_flight:
            raise ValueError(
                f"a tensor with the same name as another tensor that is still being processed was submitted: "
                f"{full_names(*key, 1)[0]}; give it another name or synchronize the first one"
            )
        self.hold(request, key)
        try:
            self.announce(signature, instance)
        except BaseException:  # no member will ever hear of it
            self.in_flight.pop(key, None)
            raise

    def hold(self, request: Request, key: Key) -> None:
        """The request is in flight from now on."""
        request.key = key
        request.parts_left = max(len(request.tensors), 1)
        self.in_flight[key] = request

    def announce(self, signature: Signature, instance: int) -> None:
        """Tell the other members about a request, when no thread is alone any more. Under the lock."""
        if self.alone:
            self._kept_back.append((signature, instance))
        else:
            self._agreement.announce(signature, instance)

    def end_alone(self) -> None:
        """The thread that was alone is done: announce what was kept back."""
        with self.lock:
            self.alone = False
            if self._kept_back:
                kept_back, self._kept_back = self._kept_back, []
                for signature, instance in kept_back:
                    self._agreement.announce(signature, instance)
