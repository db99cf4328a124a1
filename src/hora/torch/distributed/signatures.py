"""The signatures of torch's `ProcessGroup` methods: each takes lists with an options object, or single values.

`arrange` turns any of them into lists with options, the form in which torch's own functions and its C++ call a group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

_OPTION_NAMES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_OPTIONAL = ("opts", "op", "timeout")
_ABSENT = object()


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _is_list_of(kind: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(kind, value))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


_FITS: dict[str, Callable[[Any], bool]] = {
    "tensor": _is_tensor,
    "tensors": lambda value: _is_list_of(_is_tensor, value),
    "lists": lambda value: _is_list_of(_is_list, value),
    "splits": _is_list,
    "opts": lambda value: value is None or hasattr(value, "timeout"),
    "op": lambda value: isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)),
    "root": lambda value: isinstance(value, int),
    "timeout": lambda value: value is None or isinstance(value, timedelta),
}


class _Method(NamedTuple):
    """A method: the class of its options, and its forms: the names of arguments, each with what it is."""

    options: Any
    forms: Sequence[Mapping[str, str]]


def _form(text: str) -> dict[str, str]:
    """Return a form from words `name:kind`, or `name` if that says what it is."""
    return {word.split(":")[0]: word.split(":")[-1] for word in text.split()}


def _method(options: str, *forms: str) -> _Method:
    return _Method(getattr(c10d, options), [_form(text) for text in forms])


_METHODS = {
    "allreduce": _method("AllreduceOptions", "tensors opts", "tensors op timeout", "tensor op timeout"),
    "broadcast": _method("BroadcastOptions", "tensors opts", "tensor root timeout"),
    "reduce": _method("ReduceOptions", "tensors opts", "tensor root op timeout"),
    "allgather": _method(
        "AllgatherOptions",
        "output_tensors:lists input_tensors:tensors opts",
        "output_tensors:tensors input_tensor:tensor timeout",
    ),
    "gather": _method(
        "GatherOptions",
        "output_tensors:lists input_tensors:tensors opts",
        "output_tensors:tensors input_tensor:tensor root timeout",
    ),
    "scatter": _method(
        "ScatterOptions",
        "output_tensors:tensors input_tensors:lists opts",
        "output_tensor:tensor input_tensors:tensors root timeout",
    ),
    "reduce_scatter": _method(
        "ReduceScatterOptions",
        "output_tensors:tensors input_tensors:lists opts",
        "output_tensors:tensor input_tensor:tensors op timeout",
    ),
    "all_to_all_single": _method(
        "AllToAllOptions",
        "output_tensor:tensor input_tensor:tensor output_split_sizes:splits input_split_sizes:splits opts",
        "output:tensor input:tensor output_split_sizes:splits input_split_sizes:splits timeout",
    ),
    "alltoall": _method(
        "AllToAllOptions",
        "output_tensor:tensors input_tensor:tensors opts",
        "output:tensors input:tensors timeout",
    ),
    "barrier": _method("BarrierOptions", "opts", "timeout"),
}
# What a single value of a form stands for in the first one.
_LISTED = {("tensor", "tensors"), ("tensors", "lists")}


def arrange(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a method in its first form, with options. Raises TypeError if they fit no form."""
    method = _METHODS[name]
    for form in method.forms:
        found = _bound(form, given, named)
        if found is not None:
            return _in_first_form(method, form, found)
    forms = " or ".join(f"({', '.join(form)})" for form in method.forms)
    words = [type(value).__name__ for value in given]
    words += [f"{key}={type(value).__name__}" for key, value in named.items()]
    raise TypeError(f"{name} takes {forms}, but it was called with ({', '.join(words)})")


def _bound(form: Mapping[str, str], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name if they fit this form."""
    if len(given) > len(form) or not named.keys() <= form.keys() - set(list(form)[: len(given)]):
        return None
    found = dict(zip(form, given, strict=False)) | dict(named)
    for argument, kind in form.items():
        value = found.get(argument, _ABSENT)
        if kind not in _OPTIONAL if value is _ABSENT else not _FITS[kind](value):
            return None
    return found


def _in_first_form(method: _Method, form: Mapping[str, str], found: Mapping[str, Any]) -> list[Any]:
    options = found.get("opts")
    if options is None:
        options = method.options()
    for argument, attribute in _OPTION_NAMES.items():
        if found.get(argument) is not None:
            setattr(options, attribute, found[argument])
    wanted = [kind for kind in method.forms[0].values() if kind != "opts"]
    values = [(kind, found[argument]) for argument, kind in form.items() if kind not in ("opts", *_OPTION_NAMES)]
    return [
        [value] if (kind, first) in _LISTED else value for first, (kind, value) in zip(wanted, values, strict=True)
    ] + [options]


class Options(c10d.Backend.Options):
    """The options of a group, which torch copies when it splits one."""

    def __deepcopy__(self, memo: object) -> Options:
        new = Options(self.backend, self._timeout)
        new.global_ranks_in_group, new.group_name = copy.copy(self.global_ranks_in_group), self.group_name
        return new
