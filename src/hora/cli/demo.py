"""`hora demo …`: selects a lab and passes its arguments on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hora.errors import JobFailedError

__all__ = ["LABS", "main"]

LABS = {
    "penguins": ("hora.labs.penguins.demo", "three species of penguins, alone and distributed, in a minute"),
    "faults": ("hora.labs.faults.demo", "a training whose ranks you kill on its live page, while it goes on"),
    "images": ("hora.labs.images.demo", "a ResNet on handwritten digits or CIFAR-10, on two ranks"),
}


def main(argv: Sequence[str]) -> int:
    """Run a lab; without one, list the labs."""
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in LABS:
        listed = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in LABS.items())
        print(f"usage: hora demo <lab> [arguments …]\n\n{listed}\n\nhora demo <lab> --help shows its arguments.")
        if argv and argv[0] not in ("-h", "--help"):
            print(f"hora: there is no lab {argv[0]!r}", file=sys.stderr)
            return 2
        return 0
    module, _ = LABS[argv[0]]
    try:
        return int(importlib.import_module(module).main(argv[1:]) or 0)
    except JobFailedError as error:
        print(f"hora demo: {error}", file=sys.stderr)
        return error.exit_code or 1
