"""Runs a program inside one rank, with `horovod.torch` alone, and records the results.

`play` is called on every rank at the same time. It judges nothing except values against the reference.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd
from stress.judge import Outcome, Record, judge
from stress.program import AT_THE_END, Operation, Phase, Program, function_name, segments
from stress.reference import check, inputs, participants

_LEAK_LIMIT_S = 3.0


def play(text: str, folder: str, limit_s: float) -> None:
    """Run the program on this rank and write the record into the folder; raise AssertionError for leaks or hangs."""
    program = Program.from_text(text)
    rank = int(os.environ["HOROVOD_RANK"])
    _warm_up()
    threads, descriptors = set(threading.enumerate()), _descriptors()
    player = Player(program, rank)
    thread = threading.Thread(target=player.run, name="stress", daemon=True)
    thread.start()
    thread.join(limit_s)
    record = player.record
    if thread.is_alive():
        record.problems.append(f"no end within {limit_s:g} s: {player.where}\n{_stacks()}")
    else:
        record.problems += _leaks(threads, descriptors)
    path = Path(folder) / f"rank{rank}"
    path.with_suffix(".partial").write_text(record.to_text())
    path.with_suffix(".partial").rename(path)
    assert not record.problems, "\n".join(record.problems)


def read_records(program: Program, folder: str) -> dict[int, Record]:
    paths = {rank: Path(folder) / f"rank{rank}" for rank in range(program.num_ranks)}
    return {rank: Record.from_text(path.read_text()) for rank, path in paths.items() if path.exists()}


def play_and_judge(text: str, folder: str, limit_s: float) -> None:
    """Run `play`; then one rank judges all records, and raises AssertionError if anything is wrong."""
    program = Program.from_text(text)
    play(text, folder, limit_s)
    survivors = set(range(program.num_ranks)) - ({program.death.rank} if program.death else set())
    if int(os.environ["HOROVOD_RANK"]) != min(survivors):
        return
    deadline = time.monotonic() + limit_s
    while not survivors <= set(records := read_records(program, folder)) and time.monotonic() < deadline:
        time.sleep(0.002)
    wrong = judge(program, records)
    assert not wrong, "\n".join(wrong)


class _WorldEndedError(Exception):
    """The world has ended, so the rest of the program cannot run."""


class Player:
    """Runs one rank's part of a program."""

    def __init__(self, program: Program, rank: int) -> None:
        self.record = Record()
        self.where = "starting"
        self._program = program
        self._rank = rank
        self._sets: dict[int, hvd.ProcessSet] = {0: hvd.global_process_set}
        self._handles: dict[int, tuple[Phase, Operation, int, list[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        before = {name: os.environ.get(name) for name, _ in self._program.settings}
        os.environ.update(dict(self._program.settings))
        try:
            hvd.init(process_sets="dynamic")
            with contextlib.suppress(_WorldEndedError):
                for number, phase in enumerate(self._program.phases):
                    self._play_phase(number, phase)
                self._end()
        except BaseException:
            self.record.problems.append(f"crash {self.where}\n{traceback.format_exc()}")
        finally:
            self.where = "in shutdown"
            with contextlib.suppress(Exception):
                hvd.shutdown()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    def _end(self) -> None:
        self.where = "in the last barrier"
        try:
            hvd.barrier()
        except hvd.HorovodInternalError as error:
            self._ended(str(error))

    def _ended(self, text: str) -> None:
        """Handle the end of the world, which is correct if a rank has died."""
        death = self._program.death
        if death is None or f"rank {death.rank}" not in text:
            self.record.problems.append(f"the world ended {self.where}: {text}")
        raise _WorldEndedError

    # Phases.

    def _play_phase(self, number: int, phase: Phase) -> None:
        scripts = {thread: self._of_thread(phase, thread) for thread in {o.thread for o in phase.operations}}
        helpers = [
            threading.Thread(target=self._helper, args=(phase, script), name=f"stress-{thread}", daemon=True)
            for thread, script in scripts.items()
            if thread
        ]
        for helper in helpers:
            helper.start()
        try:
            for added in phase.adds:
                self._add(added)
            self._script(phase, scripts.get(0, []), self._dies_at(number))
            if phase.stamina:
                self._join_helpers(helpers)
            if phase.waits_first:
                self._wait_for(list(self._handles))
            if phase.stamina:
                self._join(number, phase)
            for removed in phase.removes:
                self._remove(removed)
        finally:
            self._join_helpers(helpers)
            self._wait_for(list(self._handles))

    def _of_thread(self, phase: Phase, thread: int) -> list[Operation]:
        return [operation for operation in phase.operations if operation.thread == thread]

    def _dies_at(self, number: int) -> int | None:
        death = self._program.death
        return death.place if death is not None and (death.rank, death.phase) == (self._rank, number) else None

    def _join_helpers(self, helpers: list[threading.Thread]) -> None:
        for helper in helpers:
            helper.join()  # `play` limits the time

    def _helper(self, phase: Phase, script: list[Operation]) -> None:
        try:
            self._script(phase, script, None)
        except _WorldEndedError:
            pass
        except BaseException:
            self.record.problems.append(f"crash in a thread\n{traceback.format_exc()}")

    def _script(self, phase: Phase, operations: list[Operation], dies_at: int | None) -> None:
        due: dict[int, list[int]] = {}
        submitted = 0
        for number, segment in enumerate(segments(operations)):
            for operation in self._ordered(segment):
                if submitted == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                submitted += 1
                self._perform(phase, operation)
                if not operation.blocking and operation.patience != AT_THE_END:
                    due.setdefault(number + operation.patience, []).append(operation.label)
            self._wait_for(due.pop(number, []))
        if dies_at is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    def _ordered(self, segment: list[Operation]) -> list[Operation]:
        """Order the operations of a segment: a blocking one stays last, and unnamed ones keep their order."""
        places = {o.label: place for place, o in enumerate(segment)}
        lag = {o.label: o.lags[self._rank] if o.lags and o.name is not None else 0 for o in segment}
        return sorted(segment, key=lambda o: (o.blocking, places[o.label] + lag[o.label]))

    # Control.

    def _control(self, what: str, call: Callable[[], Any]) -> Any:
        self.where = what
        try:
            return call()
        except (hvd.HorovodInternalError, ValueError) as error:
            if "shut down" in str(error):
                self._ended(str(error))
            raise

    def _add(self, number: int) -> None:
        ranks = list(self._program.members(number))
        self._sets[number] = self._control(f"adding set {number}", lambda: hvd.add_process_set(ranks))

    def _remove(self, number: int) -> None:
        removed = self._control(f"removing set {number}", lambda: hvd.remove_process_set(self._sets[number]))
        if removed is not True:
            self.record.problems.append(f"remove_process_set gave {removed!r} for set {number}")

    def _join(self, number: int, phase: Phase) -> None:
        for operation in phase.extras[: phase.stamina[self._rank]]:
            self._perform(phase, operation)
        self.record.joined[number] = self._control(f"in the join of phase {number}", hvd.join)

    # Operations.

    def _perform(self, phase: Phase, operation: Operation) -> None:
        if self._rank not in participants(self._program, phase, operation):
            return
        if operation.pauses_ms and operation.pauses_ms[self._rank]:
            time.sleep(operation.pauses_ms[self._rank] / 1000)
        tensors = self._tensors(operation)
        self.where = f"in #{operation.label} {function_name(operation)}"
        result, outcome = self._attempt(lambda: self._call(operation, tensors))
        if outcome is not None:
            self._note(operation, outcome)
        elif operation.blocking:
            self._note(operation, self._value(phase, operation, tensors, result))
        else:
            with self._lock:
                self._handles[operation.label] = (phase, operation, result, tensors)

    def _wait_for(self, labels: list[int]) -> None:
        """Wait in this rank's own order. Every handle must complete, even after the world has ended."""
        ended: _WorldEndedError | None = None
        for label in sorted(labels, key=lambda label: zlib.crc32(f"{label}.{self._rank}".encode())):
            with self._lock:
                waiting = self._handles.pop(label, None)
            if waiting is None:
                continue
            phase, operation, handle, tensors = waiting
            self.where = f"waiting for #{label} {function_name(operation)}"
            result, outcome = self._attempt(lambda h=handle, o=operation: self._synchronized(o, h))
            try:
                self._note(operation, outcome or self._value(phase, operation, tensors, result))
            except _WorldEndedError as end:
                ended = end
        if ended is not None:
            raise ended

    def _synchronized(self, operation: Operation, handle: int) -> Any:
        while operation.polls and not hvd.poll(handle):
            time.sleep(0.0005)
        return hvd.synchronize(handle)

    def _note(self, operation: Operation, outcome: Outcome) -> None:
        self.record.outcomes[operation.label] = outcome
        if outcome.status == "ended":
            self._ended(outcome.detail)

    def _attempt(self, call: Callable[[], Any]) -> tuple[Any, Outcome | None]:
        try:
            return call(), None
        except ValueError as error:
            return None, Outcome("refused", str(error))
        except hvd.HorovodInternalError as error:
            return None, Outcome(_status(str(error)), str(error))

    def _tensors(self, operation: Operation) -> list[torch.Tensor]:
        members = self._program.members(operation.process_set)
        with torch.inference_mode() if operation.mode == "inference" else contextlib.nullcontext():
            tensors = inputs(operation, members, self._rank)
            tensors = [_laid_out(tensor, operation.layout) for tensor in tensors]
            if operation.mistake == "complex" or (operation.mistake and operation.mistaken == self._rank):
                tensors = _mistaken(operation, tensors)
        return tensors

    def _call(self, operation: Operation, tensors: list[torch.Tensor]) -> Any:
        function = getattr(hvd, function_name(operation))
        arguments = self._arguments(operation)
        with _mode(operation.mode):
            if operation.kind == "barrier":
                return function(**arguments)
            return function(tensors if operation.grouped else tensors[0], **arguments)

    def _arguments(self, operation: Operation) -> dict[str, Any]:
        arguments: dict[str, Any] = {"process_set": self._sets[operation.process_set]}
        if operation.kind == "barrier":
            return arguments
        mine = operation.mistake if operation.mistaken == self._rank else ""
        arguments["name"] = operation.name
        if operation.kind in ("allreduce", "reducescatter"):
            other = ("Max" if operation.kind == "allreduce" else "Average") if operation.reduce_op == "Sum" else "Sum"
            arguments["op"] = getattr(hvd, other if mine == "op" else operation.reduce_op)
            arguments["prescale_factor"] = operation.prescale * (0.75 if mine == "scale" else 1.0)
            arguments["postscale_factor"] = operation.postscale
        elif operation.kind == "broadcast":
            members = self._program.members(operation.process_set)
            after = members[(members.index(operation.root) + 1) % len(members)]
            root = after if mine == "root" else operation.root
            arguments["root_rank"] = -1 if operation.mistake == "bad root" else root
        elif operation.kind == "alltoall":
            members = self._program.members(operation.process_set)
            if operation.mistake == "bad splits":
                arguments["splits"] = [10**6] * len(members)
            elif operation.splits and self._rank in members:
                splits = operation.splits[members.index(self._rank)]
                arguments["splits"] = torch.tensor(splits, dtype=torch.int32) if operation.label % 2 else list(splits)
        return arguments

    def _value(self, phase: Phase, operation: Operation, tensors: list[torch.Tensor], result: Any) -> Outcome:
        results = [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
        problem = ""
        if operation.mistake:
            problem = "an operation with a mistake has a result"
        elif operation.in_place and [id(t) for t in results] != [id(t) for t in tensors]:
            problem = "the result is not the tensor itself"
        elif not operation.in_place and not _unchanged(operation, self._program, self._rank, tensors):
            problem = "the input was changed"
        else:
            problem = check(self._program, phase, operation, self._rank, results)
        return Outcome("wrong", problem) if problem else Outcome("value", "", _digest(results))


def _status(text: str) -> str:
    low = text.lower()
    if "shut down" in low:
        return "ended"
    if "mismatched" in low:
        return "mismatch"
    if "join" in low:
        return "join"
    return "removed" if "process set" in low else "error"


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and tensor.dim() >= 1:
        wide = tensor.new_zeros((*tensor.shape, 2))
        wide[..., 0] = tensor
        return wide[..., 0]
    return tensor


def _mistaken(operation: Operation, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    first, *others = tensors
    if operation.mistake == "shape":
        # No collective accepts an additional dimension.
        return [first.unsqueeze(-1).contiguous(), *others]
    if operation.mistake == "dtype":
        return [first.to(torch.float32 if first.dtype is torch.float64 else torch.float64), *others]
    if operation.mistake == "count":
        return [*tensors, tensors[-1].clone()]
    if operation.mistake == "complex":
        return [first.to(torch.complex64), *others]
    return tensors


def _unchanged(operation: Operation, program: Program, rank: int, tensors: list[torch.Tensor]) -> bool:
    given = inputs(operation, program.members(operation.process_set), rank)
    return all(torch.equal(now, then) for now, then in zip(tensors, given, strict=True))


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    if mode == "inference":
        with torch.inference_mode():
            yield
    elif mode == "default_device":
        with torch.device("meta"):  # replaces a GPU on a machine without one
            yield
    else:
        yield


def _digest(tensors: list[torch.Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", digest)
    return digest


# Leaks of a program.

_warm = False


def _warm_up() -> None:
    """Load everything that the first world of a process keeps."""
    global _warm
    if not _warm:
        _warm = True
        hvd.init()
        hvd.allreduce(torch.ones(1))
        hvd.barrier()
        hvd.shutdown()


def _leaks(threads: set[threading.Thread], descriptors: dict[str, str]) -> list[str]:
    """Return the new threads and descriptors of a program."""
    deadline = time.monotonic() + _LEAK_LIMIT_S
    while True:
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        now = _descriptors()
        more = len(now) - len(descriptors)
        if (not left and more <= 0) or time.monotonic() > deadline:
            break
        gc.collect()  # an error's traceback may keep objects alive in a cycle
    problems = [f"threads are left: {', '.join(left)}"] if left else []
    new = ", ".join(sorted(target for number, target in now.items() if descriptors.get(number) != target))
    return problems + ([f"{more} descriptors are left: {new}"] if more > 0 else [])


def _descriptors() -> dict[str, str]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            found[path.name] = os.readlink(path)
    return found


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-8:])}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
