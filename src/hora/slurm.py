"""Parsers of the lists in Slurm's variables: `tux[001-003,010],login1`, `2(x3),1`. Pure; called by `world`."""

from __future__ import annotations

import itertools
import re

__all__ = ["node_names", "tasks_per_node"]

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_MAX_NODES = 1_000_000


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1: how many tasks each node has, in the order of the node list. Empty for no text."""
    counts: list[int] = []
    for entry in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        repeat = int(found[2] or 1) if found else 0
        if found is None or len(counts) + repeat > _MAX_NODES:
            raise ValueError(f"tasks per node must look like 2(x3),1 but are {text[:200]!r}")
        counts += [int(found[1])] * repeat
    return counts


def node_names(text: str) -> list[str]:
    """Every node of a node list, in order: `r[1-2]n[01-03]-ib,login1` has seven."""
    names: list[str] = []
    for entry in filter(None, re.split(r",(?![^\[]*\])", text)):
        parts = _GROUP.split(entry.strip())  # text, numbers, text, numbers, …, text
        choices = [_numbers(part, text) if odd % 2 else [part] for odd, part in enumerate(parts)]
        names += itertools.islice(("".join(choice) for choice in itertools.product(*choices)), _MAX_NODES)
    return names


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for entry in text.split(","):
        low, dash, high = entry.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < int(low) + _MAX_NODES):
            raise ValueError(f"a node list must look like tux[001-003,010],login1 but is {whole[:200]!r}")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found
