"""Random trainings against one process: optimizers, compressions, habits, two hosts, and ranks that die.

    python tests/fuzz/trainings.py --programs 300                 seeds 0 to 299; as root, also on two hosts
    python tests/fuzz/trainings.py --seed 17                      one training; shrunk if it fails
    python tests/fuzz/trainings.py --replay '{"column":"int8",…}'  a printed training

A training is a row of the matrix of habits (`tests/multiproc/habits.py`) with several habits at once. If a rank
dies, the job is elastic with `per_step=True`: the others continue, and every step counts once with its actual ranks.
The exit code is 1 if a training failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    *(str(HERE.parent / name) for name in ("", "multiproc", "integration")),
    str(HERE.parents[1]),
    str(HERE.parents[1] / "testbeds"),
]

import torch  # noqa: E402
from habits import COLUMNS, Column, Row, assert_alike, compare, inputs, unwrapped, wrapper  # noqa: E402
from torch import nn  # noqa: E402

import horovod.torch as hvd  # noqa: E402

ADDRESSES = ("10.78.0.1", "10.78.0.2")
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    # With a large epsilon, the order of summation cannot change the sign of a step.
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-2),
}
MOMENTS = {"momentum": ("momentum_buffer",), "Nesterov": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq")}
HABITS = ("tied", "unused", "branches", "scalar", "checkpointing", "clipping", "scaler", "scheduler", "extra", "late")
EXACT = ("plain", "sharded", "per step")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as data."""

    num_ranks: int = 2
    place: str = "one host"  # each: a host for every rank; two: hosts with two ranks each; elastic: a rank dies
    column: str = "plain"
    every: int = 1  # steps between exchanges of hosts that train apart
    optimizer: str = "SGD"
    sizes: tuple[int, ...] = (80,)
    dtype: str = "float32"
    steps: int = 6
    passes: int = 1
    habits: tuple[str, ...] = ()
    infinity: tuple[int, ...] = ()  # ranks with an infinity in step 2; requires the habit "scaler"
    thaws: int = 0  # the first layer is frozen until this step
    freezes: int = 0  # the last layer is frozen from this step on, unless 0
    resumes: int = 0  # the training is resumed from a checkpoint before this step, unless 0
    death: tuple[int, int, str] = ()  # type: ignore[assignment]  # rank, step, and "backward" or "step"

    def to_text(self) -> str:
        default = Training()
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v != getattr(default, k)})

    @classmethod
    def from_text(cls, text: str) -> Training:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()})


def generate(seed: int, places: tuple[str, ...]) -> Training:
    """Return the training of a seed."""
    some = random.Random(f"training {seed}")
    place = some.choice(places)
    columns = [name for name, column in COLUMNS.items() if place == "two" or column.between_hosts is (place == "each")]
    column = some.choice(columns if place != "elastic" else ["plain", "sharded", "int8"])
    apart, exact = COLUMNS[column].apart, column in EXACT
    num_ranks = 4 if place == "two" else 3 if place == "elastic" else some.randint(2, 4)
    optimizer = some.choice(list(MOMENTS) if column == "DES-LOC" else list(OPTIMIZERS) if exact or apart else ["SGD"])
    steps = some.randint(4, 9)
    habits = tuple(habit for habit in HABITS if some.random() < 0.25)
    training = Training(
        num_ranks=num_ranks,
        place=place,
        column=column,
        every=some.randint(1, 3) if apart else 1,
        optimizer=optimizer,
        sizes=tuple(some.choice((1, 5, 64, 90, 300)) for _ in range(some.randint(1, 3))),
        dtype=some.choice(("float32", "float32", "float64")) if exact or apart else "float32",
        steps=steps,
        passes=some.choice((1, 1, 2, 3)),
        habits=habits,
        thaws=some.choice((0, 0, 2)),
        freezes=some.choice((0, 0, 3)),
        resumes=some.choice((0, 0, 3)) if place != "elastic" else 0,
    )
    if "scaler" in habits and some.random() < 0.7:
        everywhere = tuple(range(num_ranks))  # hosts that train apart must skip the same steps
        training = replace(training, infinity=everywhere if apart else some.choice((everywhere, (1,))))
    if place == "elastic":
        death = (some.randrange(num_ranks), some.randint(1, steps - 1), some.choice(("backward", "step")))
        training = replace(training, death=death)
    return training


def row_of(training: Training) -> type[Row]:
    return type("Played", (Played,), {"training": training, "steps": training.steps, "passes": training.passes})


def column_of(training: Training) -> Column:
    column = COLUMNS[training.column]
    if not column.apart:
        return column
    options: dict[str, Any] = {"every": training.every}
    if training.column == "DES-LOC":
        options["moments"] = dict.fromkeys(MOMENTS[training.optimizer], training.every)
    assert isinstance(column.make, partial)
    return replace(column, every=training.every, make=partial(column.make, **options))


class Played(Row):
    """A row with the habits of a training."""

    training: Training

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.dtype = getattr(torch, self.training.dtype)
        self.trained: set[nn.Parameter] = set()
        super().__init__(*args, **kwargs)

    def has(self, habit: str) -> bool:
        return habit in self.training.habits

    def model(self) -> nn.Module:
        sizes = (6, *self.training.sizes, 3)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.Tanh()]
        net = nn.ModuleDict({"body": nn.Sequential(*layers)})
        if self.has("tied"):
            net["one"], net["other"] = nn.Linear(6, 6), nn.Linear(6, 6)
            net["other"].weight = net["one"].weight
        if self.has("branches"):
            net["branches"] = nn.ModuleList(nn.Linear(3, 5) for _ in range(3))
        if self.has("unused"):
            net["unused"] = nn.Linear(7, 70)
        if self.has("scalar"):
            net.scale, net.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 4))
        return net

    def plain_optimizer(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.training.optimizer](self.net.parameters())

    def prepare(self, number: int = 0) -> None:
        """Record the parameters that are trained when the optimizer is wrapped: missing gradients of these, and of
        parameters trained later, count as zero. Layers are frozen before that, or too late.
        """
        if not self.has("late"):
            self.freeze(number)
        self.trained = {parameter for parameter in self.net.parameters() if parameter.requires_grad}

    def finish_setup(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.has("scaler"))
        self.scheduler = torch.optim.lr_scheduler.StepLR(
            self.optimizer, step_size=2, gamma=0.5 if self.has("scheduler") else 1.0
        )

    def loss(self, rank: int, number: int) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        values = inputs(rank, number).to(self.dtype)
        if self.has("tied"):
            values = self.net["other"](torch.tanh(self.net["one"](values)))
        body = self.net["body"]
        values = checkpoint(body, values, use_reentrant=False) if self.has("checkpointing") else body(values)
        if self.has("branches"):
            values = self.net["branches"][(rank + number) % 3](values)
        if self.has("scalar"):
            values = values * self.net.scale + self.net.empty.sum()
        return values.square().mean()

    def iterate(self, number: int, ranks: list[int], after_backward: Any) -> None:
        training = self.training
        if training.resumes and number == training.resumes:
            self.resume(number)
        self.freeze(number)
        self.optimizer.zero_grad()
        factor = float("inf") if number == 2 and set(ranks) & set(training.infinity) else 1.0
        for part in range(training.passes):
            self.scaler.scale(self.mean_loss(ranks, number * training.passes + part) * factor).backward()
            if self.has("extra") and self.wrap is not unwrapped:
                hvd.allreduce(torch.ones(3), name="extra")
        after_backward()
        self.trained.update(p for p in self.net.parameters() if p.grad is not None)
        self.fill_missing()
        if self.has("clipping"):
            self.scaler.unscale_(self.optimizer)
            clip = nn.utils.clip_grad_norm_ if self.wrap is unwrapped else hvd.clip_grad_norm_
            clip(self.net.parameters(), 0.05)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.num_left_out += self.scaler.get_scale() < scale
        self.scheduler.step()

    def freeze(self, number: int) -> None:
        body = self.net["body"]
        body[0].requires_grad_(number >= self.training.thaws)
        if self.training.freezes:
            body[-2].requires_grad_(number < self.training.freezes)

    def fill_missing(self) -> None:
        for parameter in self.net.parameters() if self.zeros_missing else ():
            if parameter.grad is None and (parameter.requires_grad or parameter in self.trained):
                parameter.grad = torch.zeros_like(parameter)

    def resume(self, number: int) -> None:
        file = io.BytesIO()
        kept = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(kept, file)
        file.seek(0)
        kept = torch.load(file, weights_only=True)
        self.net = self.model().to(self.dtype)
        self.prepare(number)
        self.optimizer = self.wrap(self.plain_optimizer(), list(self.net.named_parameters()))
        self.finish_setup()
        for name, part in self.parts().items():
            part.load_state_dict(kept[name])
        self.resumed()

    def resumed(self) -> None:
        """Let an elastic state adopt the new objects."""

    def parts(self) -> dict[str, Any]:
        return super().parts() | {"scaler": self.scaler, "scheduler": self.scheduler}


# Functions that run on the ranks.


def play(text: str) -> None:
    """Compare a training with one process, on every rank of a static world."""
    training = Training.from_text(text)
    hosts = [[0, 1], [2, 3]] if training.place == "two" else None
    if training.place == "one host" and COLUMNS[training.column].apart:
        hosts = [list(range(training.num_ranks))]
    started = hvd.is_initialized()
    hvd.init()
    try:
        compare(row_of(training), column_of(training), hosts)
        hvd.barrier()
    finally:
        if not started:
            hvd.shutdown()


def play_on_two_hosts(texts: list[str]) -> dict[str, object]:
    """Return the errors of these trainings, run in the world of `two_hosts_rank`."""
    wrong: dict[str, object] = {}
    for text in texts:
        try:
            play(text)
        except Exception:  # run the remaining trainings, too
            wrong[text] = traceback.format_exc(limit=-4)
    return wrong


def play_with_a_death(text: str, folder: str) -> None:
    """Train on a rank of an elastic job, die as planned, and compare with one process that had the same ranks."""
    training, row = Training.from_text(text), row_of(Training.from_text(text))
    hvd.init()
    made = row(wrapper(column_of(training), row))
    state = hvd.elastic.TorchState(**made.parts(), number=0, sizes=[], per_step=True)

    def die(place: str) -> None:
        if training.death == (hvd.rank(), state.number, place):
            with contextlib.suppress(FileExistsError):
                (Path(folder) / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.number < training.steps:
            die("backward")
            made.iterate(state.number, [hvd.rank()], lambda: die("step"))
            state.sizes = [*state.sizes, hvd.size()]
            state.number += 1
            state.commit()

    train(state)
    wanted = row(unwrapped)
    for number, size in enumerate(state.sizes):
        wanted.iterate(number, list(range(size)), lambda: None)
    assert_alike(made, wanted, column_of(training))
    (Path(folder) / f"equal.{os.getpid()}").write_text(json.dumps(state.sizes))
    hvd.shutdown()


# The process that generates the trainings.


class Stage:
    """Runs trainings on pools of ranks, elastic jobs and hosts."""

    def __init__(self, limit_s: float) -> None:
        from rank_pool import Pools

        self._pools, self._limit_s, self._stack = Pools(), limit_s, contextlib.ExitStack()
        self._hosts: Any = None

    def play(self, training: Training) -> str:
        """Run a training; return its errors."""
        if training.place == "two":
            return self.play_on_two_hosts([training]).get(training, "")
        if training.place == "elastic":
            return self._play_elastic(training)
        call = ("trainings", "play", {"text": training.to_text()})
        answers = self._pools.call(training.num_ranks, _environment(training), (), *call)
        return "\n".join(f"rank {rank}: {said}" for rank, (how, said) in enumerate(answers) if how != "ok")

    def play_on_two_hosts(self, trainings: list[Training]) -> dict[Training, str]:
        from host_ranks import run_ranks
        from namespaces import joined

        if self._hosts is None:
            self._hosts = self._stack.enter_context(joined(ADDRESSES))
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "secret").write_text(os.urandom(32).hex())
        (folder / "secret").chmod(0o600)
        mode = "trainings: " + json.dumps([training.to_text() for training in trainings])
        seen = run_ranks(self._hosts, str(folder / "secret"), mode, address=ADDRESSES[0])
        wrong: dict[Training, str] = {}
        for rank, found in enumerate(seen):
            for text, said in found.items():
                training = Training.from_text(text)
                wrong[training] = wrong.get(training, "") + f"rank {rank}: {said}\n"
        return wrong

    def _play_elastic(self, training: Training) -> str:
        size = ["-np", str(training.num_ranks), "--min-np", "2", "--blacklist-cooldown-range", "1", "1"]
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, __file__, "--rank-of", folder, "--replay", training.to_text()]
            job = subprocess.run(
                [Path(sys.executable).with_name("horovodrun"), *size, *program],
                capture_output=True,
                text=True,
                timeout=self._limit_s,
                env={**os.environ, **_environment(training)},
                check=False,
            )
            equal = [json.loads(file.read_text()) for file in Path(folder).glob("equal.*")]
            died = (Path(folder) / "died").exists()
        if job.returncode or len(equal) < 2 or not died:
            said = f"status {job.returncode}, {len(equal)} ranks were equal, one died: {died}"
            return f"{said}\n{job.stdout[-4000:]}\n{job.stderr[-4000:]}"
        return ""

    def close(self) -> None:
        self._pools.close()
        self._stack.close()


def _environment(training: Training) -> dict[str, str]:
    """Modes that work between hosts have an effect on one host only without shared memory."""
    return {"HORA_TRANSPORT": "tcp"} if COLUMNS[training.column].between_hosts else {}


def shrunk(training: Training, fails: Any) -> Training:
    """Return the simplest training that still fails."""
    plain = Training()
    for field in dataclasses.fields(Training):
        if field.name in ("place", "num_ranks", "column", "death"):
            continue
        for smaller in _smaller(training, field.name, getattr(plain, field.name)):
            if smaller.infinity and "scaler" not in smaller.habits:
                continue  # the parameters would be NaN even in one process
            if fails(smaller):
                training = smaller
                break
    return training


def _smaller(training: Training, name: str, value: Any) -> Iterator[Training]:
    yield replace(training, **{name: value})
    if name == "habits":
        for habit in training.habits:
            yield replace(training, habits=(habit,))
        for habit in training.habits:
            yield replace(training, habits=tuple(other for other in training.habits if other != habit))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--places", nargs="+", help="one host, each, two, elastic", default=None)
    parser.add_argument("--replay", help="a training as text")
    parser.add_argument("--rank-of", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one training; more is a hang")
    options = parser.parse_args()
    if options.rank_of:
        play_with_a_death(options.replay, options.rank_of)
        return 0
    places = tuple(options.places or ["one host", "one host", "each", "each", "elastic"])
    if options.places is None and os.geteuid() == 0:
        places = (*places, "two", "two")
    seeds = range(options.start, options.start + options.programs) if options.seed is None else [options.seed]
    trainings = {f"seed {seed}": generate(seed, places) for seed in seeds}
    if options.replay:
        trainings = {"the replay": Training.from_text(options.replay)}
    return _play_all(trainings, Stage(options.limit), shrink=not options.no_shrink)


def _play_all(trainings: dict[str, Training], stage: Stage, *, shrink: bool) -> int:
    began, num_failed = time.monotonic(), 0
    try:
        together = [training for training in trainings.values() if training.place == "two"]
        wrong = stage.play_on_two_hosts(together) if together else {}
        for number, (what, training) in enumerate(trainings.items(), 1):
            if number % 50 == 0:
                print(f"{number} trainings, {num_failed} failed", flush=True)
            said = wrong.get(training, "") if training.place == "two" else stage.play(training)
            if said:
                num_failed += 1
                print(f"{what} failed: {training.to_text()}\n{said}", flush=True)
                smallest = shrunk(training, lambda smaller: bool(stage.play(smaller))) if shrink else training
                print(f"\n    python tests/fuzz/trainings.py --replay '{smallest.to_text()}'\n", flush=True)
    finally:
        stage.close()
    print(f"{len(trainings)} trainings, {num_failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
