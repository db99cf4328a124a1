"""Workers forked from a process that has loaded their modules: when that is as good as a fresh one, and what they do then.

Nothing is forked here: the `zygote` does it on a host, `spark.warm` in Spark's Python workers. Supervisors import this
too, and start fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from hora.launch.environment import replace_variables
from hora.launch.host.processes import name_process

__all__ = ["differ_only_in", "load", "run_forked"]

_ALWAYS = ("hora.launch.pickling",)


def load(modules: Iterable[str]) -> bool:
    """Load what a worker imports anyway, and these modules. False if that failed; the worker will say it better."""
    loaded = True
    for name in (*_ALWAYS, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            print(f"hora: {name} could not be loaded in advance: {error!r}", file=sys.stderr)
            loaded = False
    return loaded


def differ_only_in(one: Mapping[str, str], other: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    """Whether two environments are the same but for variables with these prefixes. Any other one might have been read by
    what is loaded already."""
    changed = {name for name in {*one, *other} if one.get(name) != other.get(name)}
    return all(name.startswith(prefixes) for name in changed)


def run_forked(env: Mapping[str, str], work: Callable[[], NoReturn]) -> NoReturn:
    """In a fork that has its streams: be a worker with this environment. `work` is `worker.work`, which ends the process."""
    name_process(f"hora-rank-{env['HORA_WORKER']}")
    replace_variables(env)
    _reseed_generators()
    work()


def _reseed_generators() -> None:
    """Random numbers of this process's own, as one that has just started has them.

    Python sees to its own generator; NumPy's and torch's would give every rank, and every job, the same numbers.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
