"""torch.compile calls this package's functions as they are, instead of tracing into them.

Dynamo would trace from a compiled function through `hvd.allreduce` into the engine, and from each call that torch's C++
code makes, such as those of DDP, into a process group. The engine's waits and memory are beyond what it can trace. A
call is one graph break. Functions that only ask for this process's place (`hvd.rank()`) are traced: they become
constants of the graph.

Marks are in the code objects, as `torch.compiler.disable(recursive=True)` sets them, but without its wrapper, which
would cost every call, and without the import of Dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PACKAGE = __name__.rpartition(".")[0]
_TRACED = {f"{_PACKAGE}.{name}" for name in ("basics", "process_sets", "reduce_op")}
_marked: set[str] = set()


def leave_untraced() -> None:
    """Mark the functions of this package's modules, as far as they are imported and not marked yet."""
    mark = _marker()
    for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
        if mark is not None and name not in _marked | _TRACED:
            _marked.add(name)
            for function in _functions_of(sys.modules[name]):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                for code in _codes_of(function.__code__):
                    mark(code)


def _marker() -> Any:
    """Return the function that keeps Dynamo out of a code object; None if this torch has none."""
    eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return None
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the frame, and of all frames below it
    return lambda code: eval_frame.set_code_exec_strategy(code, strategy)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    for value in own:
        for member in vars(value).values() if isinstance(value, type) else [value]:
            yield from _underlying(member)


def _underlying(member: object) -> list[FunctionType]:
    found = [member.fget, member.fset] if isinstance(member, property) else [getattr(member, "__func__", member)]
    return [function for function in found if isinstance(function, FunctionType)]


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it: hooks, callbacks."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)
