"""Announcements as bytes: 8-byte records (signature number, instance), and whole signatures the first time.

A signature is sent once and then known by its number, so a repeated request costs 8 bytes. Numbers belong to the member
that sends them; when it has too many it forgets them all and begins anew. Used by every kind of agreement.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hora.engine.request import Signature

__all__ = ["RECORD", "Announcer", "Reader"]

RECORD = struct.Struct("<II")
_DEFINE = 0xFFFFFFFF  # the record's second word is the length of the signature that follows, padded to whole records
_FORGET = 0xFFFFFFFE  # the member starts numbering its signatures anew
_KEPT_SIGNATURES = 65536


class Announcer:
    """Turns requests into bytes, sending each signature once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: dict[Signature, int] = {}
        self._by_id: dict[int, tuple[Signature, int]] = {}  # the same, without hashing; holds the signatures

    def number(self, signature: Signature) -> int:
        """The number of a signature that was sent before and is not looked up for the first time; -1 for any other."""
        known = self._by_id.get(id(signature))
        return -1 if known is None else known[1]

    def encode(self, signature: Signature, instance: int) -> bytes:
        known = self._by_id.get(id(signature))
        if known is not None:
            return RECORD.pack(known[1], instance)
        number = self._numbers.get(signature)
        if number is not None:
            if len(self._by_id) < 4 * max(self._capacity, 1):
                self._by_id[id(signature)] = (signature, number)
            return RECORD.pack(number, instance)
        prefix = b""
        if len(self._numbers) >= max(self._capacity, 1):
            self._numbers.clear()
            self._by_id.clear()
            prefix = RECORD.pack(_FORGET, 0)
        number = self._numbers[signature] = len(self._numbers)
        text = signature.encode()
        padding = -len(text) % RECORD.size
        return prefix + RECORD.pack(_DEFINE, len(text)) + text + bytes(padding) + RECORD.pack(number, instance)


class Reader:
    """Reads one member's announcements. Equal signatures become one object, so that comparing them is cheap."""

    def __init__(self, interned: dict[Signature, Signature]) -> None:
        self._interned = interned
        self._known: list[Signature] = []
        self._partial = b""  # a signature may be longer than what its writer could place in one go

    def known_all(self, numbers: Sequence[int]) -> list[Signature] | None:
        """The signatures with these numbers; None when there is anything else among them."""
        known = self._known
        if self._partial or max(numbers) >= len(known):
            return None
        return [known[number] for number in numbers]

    def decode(self, data: bytes) -> list[tuple[Signature, int]]:
        if self._partial:
            data = self._partial + data
            self._partial = b""
        words = struct.unpack(f"<{len(data) // 4}I", data)
        num_words = len(words)
        known = self._known
        found: list[tuple[Signature, int]] = []
        position = 0
        while position < num_words:
            number, instance = words[position], words[position + 1]
            if number == _DEFINE:
                after = position + 2 + -(-instance // RECORD.size) * 2
                if after > num_words:
                    self._partial = data[position * 4 :]
                    break
                start = (position + 2) * 4
                signature = Signature.decode(data[start : start + instance])
                if len(self._interned) >= _KEPT_SIGNATURES:
                    self._interned.clear()  # then equal ones may be two objects: slower to compare, still right
                known.append(self._interned.setdefault(signature, signature))
                position = after
                continue
            if number == _FORGET:
                known.clear()
            else:
                found.append((known[number], instance))
            position += 2
        return found
