"""Optimizers that communicate between hosts only now and then: `LocalSGD`, `DiLoCo` and `DESLOC`.

The host is the worker. Ranks of a host reduce gradients in every step, as with `DistributedOptimizer`; no gradient is
sent between hosts. Instead, each fragment of the parameters has an anchor, equal on all hosts. Every few steps the
hosts average their distance from the anchor (the pseudo-gradient), an outer optimizer moves the anchor by it, and the
parameters follow. With `overlap` a fragment is in flight for some steps; the host's progress meanwhile is kept on top.

    at rest --its turn--> in flight --`overlap` steps later--> the anchor moves, at rest

The three optimizers differ only in their settings. A fragment lost with a world costs only time: the next
pseudo-gradient starts from the anchor again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hora import engine
from hora.engine.request import Kind, Reduce
from hora.errors import HorovodInternalError
from hora.torch.compression import Compression, Compressor, PowerSGD, described
from hora.torch.functions import allgather_object
from hora.torch.optimizer.distributed import of_class
from hora.torch.optimizer.grad_scaler import reduce_before_unscaling
from hora.torch.optimizer.hooks import _DistributedOptimizer
from hora.torch.optimizer.order import numbers
from hora.torch.optimizer.parameters import parameter_names, parameters_of
from hora.torch.optimizer.powersgd import working_dtype
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, RequestedReduction
from hora.torch.optimizer.step_state import StepState
from hora.torch.process_sets import global_process_set, host_process_set

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

_averaging: Outer = partial(torch.optim.SGD, lr=1.0)
_nesterov: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    every: int,
    overlap: int = 0,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return the same optimizer; hosts train independently and average their parameters every `every` steps.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        named_parameters: `model.named_parameters()`: names for messages, and the parameters that take part.
        every: Steps between two averages of the parameters.
        overlap: Steps during which an average may stay under way; what is learnt meanwhile is kept on top.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
    """
    settings = _Settings("LocalSGD", every=every, overlap=overlap, compression=compression)
    return _made(optimizer, named_parameters, settings, backward_passes_per_step)


def DiLoCo(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    outer: Outer = _nesterov,
    every: int = 100,
    fragments: int = 4,
    overlap: int | None = None,
    compression: type[Compressor] | Compressor = Compression.bf16,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return the same optimizer as the inner optimizer of DiLoCo (arXiv 2311.08105, by fragments: 2501.18512).

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        named_parameters: `model.named_parameters()`: names for messages, and the parameters that take part.
        outer: Creates the outer optimizer from a list of tensors.
        every: Steps between two exchanges of the same fragment.
        fragments: Parts of the parameters, each of which has its turn, evenly spaced.
        overlap: Steps during which a fragment is in flight; by default half the time until the next turn.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
    """
    if overlap is None:
        overlap = every // (2 * fragments) if _is_count(every) and _is_count(fragments) else 0
    settings = _Settings(
        "DiLoCo", every=every, fragments=fragments, overlap=overlap, compression=compression, outer=outer
    )
    return _made(optimizer, named_parameters, settings, backward_passes_per_step)


def DESLOC(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    every: int = 32,
    moments: Mapping[str, int] | None = None,
    overlap: int = 0,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return the same optimizer; hosts average parameters and moments, each at its own period (arXiv 2505.22549).

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        named_parameters: `model.named_parameters()`: names for messages, and the parameters that take part.
        every: Steps between two averages of the parameters.
        moments: The period of each entry of the optimizer's state, by name; by default Adam's, 3 and 6 times `every`.
        overlap: Steps during which an average may stay under way; what is learnt meanwhile is kept on top.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        backward_passes_per_step: Gradients of this many backward passes are added up before they are reduced and
            applied.
    """
    if moments is None:
        moments = {"exp_avg": 3 * every, "exp_avg_sq": 6 * every} if _is_count(every) else {}
    settings = _Settings("DESLOC", every=every, overlap=overlap, compression=compression, moments=moments)
    return _made(optimizer, named_parameters, settings, backward_passes_per_step)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Validated settings of the user."""

    method: str
    _: dataclasses.KW_ONLY
    every: int
    fragments: int = 1
    overlap: int = 0
    compression: type[Compressor] | Compressor = Compression.none
    outer: Outer = _averaging
    moments: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"every": self.every, "fragments": self.fragments}
        counts |= {f"moments[{name!r}]": period for name, period in self.moments.items()}
        for name, value in counts.items():
            if not _is_count(value):
                raise ValueError(f"{self.method}'s {name} must be an integer of at least 1, but it is {value!r}")
        if self.fragments > self.every:
            raise ValueError(
                f"{self.method} sends one fragment at a time: fragments ({self.fragments}) must not be more than "
                f"every ({self.every})"
            )
        shortest = min((self.every, *self.moments.values()))
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap < shortest:
            raise ValueError(
                f"{self.method}'s overlap must be an integer from 0 to {shortest - 1}, so that a fragment arrives "
                f"before its next turn, but it is {self.overlap!r}"
            )
        is_known = any(self.compression is known for known in vars(Compression).values())
        if self.compression is PowerSGD or not is_known:
            raise ValueError(
                f"{self.method} supports Compression.none, fp16, bf16 or int8, but compression is "
                f"{described(self.compression)}"
            )
        if not callable(self.outer):
            raise ValueError(
                "DiLoCo's outer must create an optimizer from a list of tensors, such as "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), but it is "
                f"{self.outer!r:.100}"
            )


def _made(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    settings: _Settings,
    backward_passes_per_step: int,
) -> Any:
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(
            f"hvd.{settings.method} reduces gradients inside each host by itself: give it the plain optimizer, not "
            "one of hvd.DistributedOptimizer; sharded=True is not supported, because then no rank has whole "
            "parameters and moments"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"hvd.{settings.method} does not support LBFGS, which compares losses of all ranks")
    names = parameter_names(optimizer, named_parameters)
    _check_real(settings.method, names)
    reduce_before_unscaling()
    result = of_class(optimizer, LocalOptimizer)
    result._settings, result._fixed_groups = settings, f"hvd.{settings.method}"
    options = ReduceOptions(process_set=global_process_set, names=names)
    result._distribute(options, groups=(), backward_passes_per_step=backward_passes_per_step)
    return result


def _check_real(method: str, names: Mapping[torch.Tensor, str]) -> None:
    for parameter, name in names.items():
        if parameter.is_complex():
            raise ValueError(
                f"hvd.{method} averages real parameters, but {name} is {parameter.dtype}; train its real and imaginary "
                "parts as real parameters (torch.view_as_complex in forward)"
            )


class _Fragment:
    """Tensors of the model or of the optimizer's state that the hosts average together, and their anchors.

    With `outer` the averaged distance is the gradient of the anchors; without it the anchors become the average.
    Anchors have one dtype and lie in host memory, independent of the tensors. A tensor that is None, because the
    optimizer has no state for its parameter yet, counts as zeros. Without a `name` nothing is sent: on a single host
    all ranks have equal values.
    """

    def __init__(
        self,
        settings: _Settings,
        name: str,
        values: Callable[[], Sequence[torch.Tensor | None]],
        anchors: Sequence[torch.Tensor],
        *,
        every: int,
        offset: int,
        outer: torch.optim.Optimizer | None,
    ) -> None:
        self._settings, self._values, self._anchors, self._outer = settings, values, anchors, outer
        self.every, self.offset = every, offset
        flat = torch.zeros(sum(a.numel() for a in anchors), dtype=anchors[0].dtype, device="cpu")
        parts = flat.split([a.numel() for a in anchors])
        self._distances = [part.view(a.shape) for part, a in zip(parts, anchors, strict=True)]
        self._sent: list[torch.Tensor] = []
        self.due_at = 0  # the step after which it is merged; 0: at rest
        # The steps that this rank has made, and those it has reduced but left out; they must be equal on all ranks.
        self._progress = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._reductions: list[RequestedReduction] = []
        if name:
            options = ReduceOptions(process_set=global_process_set, compression=settings.compression)
            reduce = options.reduce._replace(code=options.code_in_buckets([flat]))
            self._reductions = [
                RequestedReduction(options, Kind.ALLGATHER, self._progress, name=f"{name} (step)", reduce=Reduce()),
                RequestedReduction(options, Kind.ALLREDUCE, flat, name=name, reduce=reduce),
            ]

    def send(self, due_at: int, progress: tuple[int, int]) -> None:
        """Start averaging the distance between the tensors and their anchors. `progress` is this rank's."""
        self.due_at = due_at
        values = [_on_host(v, a) for v, a in zip(self._values(), self._anchors, strict=True)]
        for distance, anchor, value in zip(self._distances, self._anchors, values, strict=True):
            torch.sub(anchor, value, out=distance)
        goes_on = due_at > progress[0] and self._outer is not None
        self._sent = [value.clone() for value in values] if goes_on else []
        self._progress.copy_(torch.tensor(progress, device="cpu"))
        for reduction in self._reductions:
            reduction.start(background=True)

    def apply(self) -> None:
        """Wait for the average, move the anchors, and update the tensors."""
        self.due_at = 0
        self.wait()
        if self._outer is None:
            torch._foreach_sub_(list(self._anchors), self._distances)
        else:
            for anchor, distance in zip(self._anchors, self._distances, strict=True):
                anchor.grad = distance
            self._outer.step()
            for anchor in self._anchors:
                anchor.grad = None
        for number, (anchor, value) in enumerate(zip(self._anchors, self._values(), strict=True)):
            if value is not None:
                moved = _on_host(value, anchor) - self._sent[number] if self._sent else None
                value.detach().copy_(anchor if moved is None else anchor + moved)
        self._sent = []

    def wait(self) -> None:
        """Wait for the average. Raises HorovodInternalError with the ranks that have made other steps."""
        if not self._reductions:
            return
        gathered, _ = [reduction.wait() for reduction in self._reductions]
        progress = gathered.view(-1, 2).tolist()
        other = next((rank for rank, theirs in enumerate(progress) if theirs != progress[0]), None)
        if other is not None:
            found = [f"rank {r} has made {progress[r][0]} steps and left out {progress[r][1]}" for r in (0, other)]
            raise HorovodInternalError(
                f"Mismatched steps of hvd.{self._settings.method}: {', '.join(found)}; all hosts must make and leave "
                "out the same steps. A GradScaler leaves a step out on the host that has an infinity: use bfloat16 "
                "without one"
            )


def _on_host(value: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(anchor) if value is None else value.detach().to("cpu", anchor.dtype)


class LocalOptimizer(_DistributedOptimizer):
    """Mixin before the user's optimizer class, like its base class."""

    keeps_outer_state = True
    outer: torch.optim.Optimizer  # set by the first step
    _settings: _Settings
    _num_steps = 0
    _num_left_out = 0
    _label = ""  # until the hosts have met in this world
    _anchors: Sequence[torch.Tensor] = ()
    _fragments: Sequence[_Fragment] = ()
    _num_joins = 0

    # --- inside the host ---------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        """Reset; the next backward creates the hosts' process sets, because newcomers start while others train."""
        self._discard_fragments()
        self._runtime = engine.current_runtime()
        self._step = StepState()
        self._reducer = Reducer()
        self._label = ""

    def _discard_fragments(self) -> None:
        """Discard fragments, including those in flight: the next distance starts from the anchor again."""
        for fragment in self._fragments:
            if fragment.due_at and not self._world_changed():
                with contextlib.suppress(HorovodInternalError):  # the world is gone, which is known already
                    fragment.wait()
        self._fragments = ()

    def _begin_backward(self) -> None:
        self._enter_world()
        super()._begin_backward()

    def synchronize(self) -> None:
        if self._active:
            self._enter_world()
        super().synchronize()

    def _step_left_out(self) -> None:
        self._num_left_out += 1
        super()._step_left_out()

    def _enter_world(self) -> None:
        """Agree on the settings and find the ranks of this host (collective, once per world)."""
        if self._label and engine.current_runtime() is self._runtime:
            return
        self._start_over()
        label = self._agreed_label()
        self._options = dataclasses.replace(self._options, process_set=host_process_set())
        super()._start_over()
        if self._options.num_members == 1:
            self._reducer = Reducer()
        self._num_joins = self._runtime.num_joins
        self._num_left_out = 0
        self._label = label

    def _agreed_label(self) -> str:
        """Return a label of this optimizer's exchanges in this world; raises unless all ranks have its settings."""
        settings = self._settings
        trial = settings.outer([torch.zeros(1, device="cpu")])
        outer = f"{type(trial).__name__}({', '.join(f'{k}={v}' for k, v in sorted(trial.defaults.items()))})"
        # With a number unique per optimizer and world, so that no two exchanges share a name.
        told = [
            settings.method,
            *(f"{name}={getattr(settings, name)}" for name in ("every", "fragments", "overlap")),
            f"compression={described(settings.compression)}",
            f"moments={dict(settings.moments)}",
            f"outer={outer}",
            f"parameters of {', '.join(f'{tuple(p.shape)}' for p in parameters_of(self))}",
        ]
        found = allgather_object((told, next(numbers)), name="optimizer.local_settings")
        (method, *first), _ = found[0]
        for rank, ((theirs, *others), _) in enumerate(found):
            if [theirs, *others] != [method, *first]:
                here, there = next((pair for pair in zip(first, others, strict=True) if pair[0] != pair[1]), ("", ""))
                raise HorovodInternalError(
                    f"Mismatched settings: rank 0 has {method} {here}, rank {rank} has {theirs} {there}; use the same "
                    "settings on all ranks"
                )
        return f"optimizer.{sum(number for _, number in found)}"

    # --- between the hosts -------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step inside the host, then send and merge the fragments that are due."""
        self._prepare()
        if self._active and self._runtime.num_joins != self._num_joins:
            raise ValueError(
                f"hvd.join() cannot be used with hvd.{self._settings.method}: the hosts must make equally many steps"
            )
        result = super().step(closure)
        self._num_steps += 1
        self._prepare()  # parameters may have been thawed in this step
        due_at, progress = self._num_steps + self._settings.overlap, (self._num_steps, self._num_left_out)
        with torch.no_grad():
            for fragment in self._fragments:
                if self._num_steps % fragment.every == fragment.offset:
                    fragment.send(due_at, progress)
            for fragment in self._fragments:
                if fragment.due_at == self._num_steps:
                    fragment.apply()
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def exchange(self) -> None:
        """Average all hosts' parameters now (collective): at the end of training, or before an evaluation."""
        self._prepare()
        progress = (self._num_steps, self._num_left_out + bool(self._step.reduced))
        with torch.no_grad():
            for fragment in self._fragments:
                if fragment.due_at:
                    fragment.apply()
            for fragment in self._fragments:
                fragment.send(self._num_steps, progress)
            for fragment in self._fragments:
                fragment.apply()

    def _prepare(self) -> None:
        if self._active:
            self._enter_world()
        if not self._fragments:
            self._make_fragments()

    def _make_fragments(self) -> None:
        """Divide the parameters into fragments. Their values, equal before the first step, are the first anchors."""
        settings, parameters, made = self._settings, parameters_of(self), list[_Fragment]()
        self._make_anchors(parameters)
        wanted = list[Any]()  # name, parameters, how to read their values, anchors, period, offset, outer optimizer
        for number, part in enumerate(_near_even([p.numel() for p in parameters], settings.fragments)):
            name, offset = f"fragment {number} of {settings.fragments}", number * settings.every // settings.fragments
            wanted.append((name, parameters[part], list, self._anchors[part], settings.every, offset, self.outer))
        # A parameter may be frozen before the first step and thawed later.
        hooked = self._requires_update
        trained = [p for p in parameters if p.requires_grad or p in hooked or self.state.get(p)]
        for name, every in settings.moments.items():
            anchors = [torch.zeros(p.shape, dtype=working_dtype(p), device="cpu") for p in trained]
            wanted.append((f"moment {name}", trained, partial(self._moments, name), anchors, every, 0, None))
        alone = not self._active or self._options.process_set_id == 0
        for name, some, values, anchors, every, offset, outer in wanted:
            for dtype in dict.fromkeys(anchor.dtype for anchor in anchors):
                pairs = [pair for pair in zip(some, anchors, strict=True) if pair[1].dtype is dtype]
                of, alike = partial(values, [p for p, _ in pairs]), [anchor for _, anchor in pairs]
                label = "" if alone else f"{self._label}.{settings.method} {name}, {dtype}"
                made.append(_Fragment(settings, label, of, alike, every=every, offset=offset, outer=outer))
        self._fragments = made

    def _make_anchors(self, parameters: Sequence[torch.Tensor]) -> None:
        """Create an anchor for each parameter that has none: at first for all, later for an added group."""
        new = [
            p.detach().to("cpu", working_dtype(p), copy=True, memory_format=torch.contiguous_format)
            for p in parameters[len(self._anchors) :]
        ]
        if not self._anchors:
            self.outer = self._settings.outer(new)
        elif new:
            self.outer.param_groups[0]["params"].extend(new)
        self._anchors = [*self._anchors, *new]

    def _moments(self, name: str, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return this state entry of each parameter; None where the optimizer has no state yet."""
        found = []
        for parameter in parameters:
            state = self.state.get(parameter, {})
            if state and not isinstance(state.get(name), torch.Tensor):
                raise ValueError(
                    f"hvd.DESLOC averages {name!r}, but {self._base_class.__name__} keeps {sorted(state)} for "
                    f"{self._parameter_names[parameter]}; name others in moments={{…}}"
                )
            found.append(state.get(name))
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its parameters, equal on all hosts before the next step, become their own anchors."""
        super().add_param_group(param_group)
        if hasattr(self, "_settings"):
            _check_real(self._settings.method, self._parameter_names)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inner optimizer's state with the outer one's: anchors, state and step count.

        It can be loaded on any number of hosts and with other settings; a plain optimizer can load its part.
        """
        state = super().state_dict(*args, **kwargs)
        if self._anchors:
            state["outer"] = {
                "num_steps": self._num_steps,
                "anchors": [anchor.detach() for anchor in self._anchors],
                "optimizer": self.outer.state_dict(),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state on all ranks and discard fragments in flight."""
        self._discard_fragments()
        super().load_state_dict(state_dict, *args, **kwargs)
        kept = state_dict.get("outer")
        if kept is None:
            self._anchors, self._num_steps = (), 0
            return
        self._make_anchors(parameters_of(self))
        if [a.shape for a in kept["anchors"]] != [a.shape for a in self._anchors]:
            raise ValueError("the loaded outer state belongs to a model with other parameters")
        for anchor, value in zip(self._anchors, kept["anchors"], strict=True):
            anchor.copy_(value)
        self.outer.load_state_dict(kept["optimizer"])
        self._num_steps = int(kept["num_steps"])


def _near_even(sizes: Sequence[int], num_parts: int) -> list[slice]:
    """Return consecutive parts with similar sums."""
    total, passed = sum(sizes), 0
    ends = [0]
    for index, size in enumerate(sizes):
        while len(ends) < num_parts and passed + size / 2 >= total * len(ends) / num_parts:
            ends.append(index)
        passed += size
    ends += [len(sizes)] * (num_parts + 1 - len(ends))
    return list(map(slice, ends, ends[1:]))
