"""An elastic job in a separate process, and the results of its ranks.

As a program: `python elastic_job.py JSON`, with the arguments of `horovod.run` and a plan or worlds to replay, prints
the results as JSON. With a plan alone it runs as a rank of a job and writes its result to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # no pytest adds it to the path when this runs as a program

from job_process import JobProcess

from waiting import wait_until

_RESULT = "RESULT "


class ElasticJob(JobProcess):
    """`plan`: see `elastic_training`. `arguments`: those of `horovod.run`."""

    def __init__(
        self,
        work: Path,
        plan: dict[str, Any],
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        **arguments: Any,
    ) -> None:
        self.folder = work / "job"
        self.folder.mkdir()
        self.plan = {"samples": 48, "epochs": 2, "batch": 2, **plan, "folder": str(self.folder)}
        order = json.dumps({"plan": self.plan, "arguments": arguments})
        # torch creates this folder at import and does not remove it.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), **(environment or {})}
        self.prefix, self.environment = prefix, os.environ | own
        self.place = {name: arguments[name] for name in ("network_interfaces", "start_timeout") if name in arguments}
        super().__init__([*prefix, sys.executable, __file__, order], work, **own)

    def results(self, limit_s: float = 120.0) -> list[dict[str, Any]]:
        """Return the ranks' results, after checking that nothing of the job is left."""
        status = self.wait(limit_s)
        assert status == 0, self.text()
        (line,) = [line for line in self.text().splitlines() if line.startswith(_RESULT)]
        self.assert_nothing_left()
        found: list[dict[str, Any]] = json.loads(line.removeprefix(_RESULT))
        return found

    def host(self, name: str) -> str:
        """Return the name under which the host of a rank can be reached."""
        return name

    def step(self) -> int:
        """Return the number of committed steps."""
        try:
            return int((self.folder / "progress").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    def wait_for_step(self, number: int) -> None:
        wait_until(f"step {number}", lambda: self.step() >= number or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def notes(self, kind: str = "enters") -> list[str]:
        """Return the ranks' notes of this kind: a rank enters the loop, or rank 0 observes a commit."""
        return [note for note in self._notes() if note.split()[2] == kind]

    def _notes(self) -> list[str]:
        try:
            return (self.folder / "notes").read_text().splitlines()
        except FileNotFoundError:
            return []

    def worker(self, number: int) -> int:
        """Return the process of a worker that has trained."""
        for note in self.notes():
            if note.endswith(f"/{number}"):
                return int(note.split()[1])
        raise AssertionError(f"worker {number} has not trained:\n{self.text()}")


def assert_good_ending(job: ElasticJob, results: list[dict[str, Any]]) -> None:
    """Check that all ranks hold the same state, equal to that of an undisturbed run of the committed steps, that all
    epochs finished, and that every sample was seen as the sampler promises."""
    plan, first = job.plan, results[0]
    for result in results:
        for name in ("weights", "momentum", "epoch", "steps", "seen", "sizes"):
            assert result[name] == first[name], f"rank {result['rank']} has another {name} than rank 0"
    from elastic_training import replay

    assert first["weights"] == pytest.approx(replay(first["seen"], first["sizes"]), rel=1e-3, abs=1e-5)
    assert first["epoch"] == plan["epochs"]
    assert first["steps"] == len(first["seen"]) == len(first["sizes"])
    for epoch in range(plan["epochs"]):
        seen = [i for its, indices in first["seen"] if its == epoch for i in indices]
        assert set(seen) == set(range(plan["samples"])), f"epoch {epoch} left samples out"
        # Repeated samples are padding of the epoch's last batch: a broken world repeats no committed sample.
        assert len(seen) - plan["samples"] < max(first["sizes"]) * plan["batch"]


def assert_no_step_lost(job: ElasticJob, results: list[dict[str, Any]]) -> None:
    """Check that losses, weights and optimizer state equal, bit for bit, those of a run without failures that has the
    same ranks in the same steps: no step was applied twice, partly, or by some ranks only.

    Replays every world from its initial state and compares the result with the initial state of the next world.
    """
    import torch

    first, folder = results[0], job.folder
    for result in results:
        for name in ("weights", "momentum", "losses", "worlds"):
            assert result[name] == first[name], f"rank {result['rank']} has another {name} than rank 0"
    began = {int(file.name.split(".")[1]): torch.load(file) for file in folder.glob("world.*.pt")}
    steps: dict[int, list[list[int]]] = {world: [] for world in sorted(began)}
    for world, (_, samples) in zip(first["worlds"], first["seen"], strict=True):
        steps[world].append(samples)
    losses = {}
    for hosts in {tuple(state["hosts"]) for state in began.values()}:
        worlds = {world: its for world, its in steps.items() if its and tuple(began[world]["hosts"]) == hosts}
        losses.update(_again(job, list(hosts), worlds) if worlds else {})
    assert [loss for world, its in steps.items() if its for loss in losses[world]] == first["losses"]
    from elastic_training import network

    _assert_same_bits(began[min(began)]["net"], network(seed=0).state_dict(), "the beginning")
    at: dict[str, Any] = began[min(began)]
    for world in steps:
        for part in ("net", "optimizer"):
            _assert_same_bits(began[world][part], at[part], f"{part} when world {world} began")
        at = torch.load(folder / f"again.{world}.pt") if steps[world] else at
    assert torch.cat([value.flatten() for value in at["net"].values()]).tolist() == first["weights"]
    state = at["optimizer"]["state"]
    assert [value.double().sum().item() for item in state.values() for value in item.values()] == first["momentum"]


def _assert_same_bits(found: Any, expected: Any, where: str) -> None:
    import torch

    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_same_bits(found[key], value, f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            _assert_same_bits(found[index], value, f"{where}: {index}")
    else:
        assert found == expected, where


def _again(job: ElasticJob, hosts: list[str], worlds: dict[int, list[list[int]]]) -> dict[int, list[list[float]]]:
    """Replay these worlds on ranks of these hosts, in a process like the job's own."""
    names = list(dict.fromkeys(hosts))
    assert hosts == sorted(hosts, key=names.index), "the ranks of a host are numbered together"
    where = ",".join(f"{job.host(name)}:{hosts.count(name)}" for name in names)
    arguments = dict(job.place, num_proc=len(hosts), hosts=where)
    sharded = job.plan.get("sharded", False)
    order = json.dumps({"again": [str(job.folder), list(worlds.items()), sharded], "arguments": arguments})
    command = [*job.prefix, sys.executable, __file__, order]
    done = subprocess.run(command, capture_output=True, text=True, env=job.environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    return dict(json.loads(line.removeprefix(_RESULT))[0])


def call_again(
    folder: str, worlds: list[tuple[int, list[list[int]]]], sharded: bool
) -> list[tuple[int, list[list[float]]]]:
    """Replay worlds on a worker."""
    import torch.optim  # noqa: F401
    from elastic_training import train_again

    import horovod.torch  # noqa: F401

    return list(train_again(folder, dict(worlds), sharded).items())


def call(plan: dict[str, Any]) -> dict[str, Any]:
    """Train on a worker. Imports torch, its optimizers and horovod.torch here so that the fork server preloads them."""
    import torch.optim  # noqa: F401
    from elastic_training import train

    import horovod.torch  # noqa: F401

    return train(plan)


def main() -> None:
    import horovod

    order = json.loads(sys.argv[1])
    if "arguments" not in order:
        result = call(order["plan"])
        (Path(order["plan"]["folder"]) / f"result.{result['rank']}").write_text(json.dumps(result))
        return
    function, args = (call_again, order["again"]) if "again" in order else (call, [order["plan"]])
    results = horovod.run(function, args=tuple(args), **order["arguments"])
    print(_RESULT + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
