"""An elastic job in a process of its own, and what its ranks returned: for the elastic tests.

As a program: `python elastic_job.py JSON` with the arguments of `horovod.run` and a plan; prints the results as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # as a program it has no pytest to find `waiting` for it

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
        torchs_own = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}  # torch makes it at import, and leaves it
        super().__init__([*prefix, sys.executable, __file__, order], work, **torchs_own, **(environment or {}))

    def results(self, limit_s: float = 120.0) -> list[dict[str, Any]]:
        """What the ranks returned; nothing may be left of the job."""
        status = self.wait(limit_s)
        assert status == 0, self.text()
        (line,) = [line for line in self.text().splitlines() if line.startswith(_RESULT)]
        self.assert_nothing_left()
        found: list[dict[str, Any]] = json.loads(line.removeprefix(_RESULT))
        return found

    def step(self) -> int:
        """How many steps were committed."""
        try:
            return int((self.folder / "progress").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    def wait_for_step(self, number: int) -> None:
        wait_until(f"step {number}", lambda: self.step() >= number or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def notes(self, kind: str = "enters") -> list[str]:
        """What the ranks wrote down: when they entered the loop, which steps rank 0 saw committed."""
        return [note for note in self._notes() if note.split()[2] == kind]

    def _notes(self) -> list[str]:
        try:
            return (self.folder / "notes").read_text().splitlines()
        except FileNotFoundError:
            return []

    def worker(self, number: int) -> int:
        """The process of a worker that has trained."""
        for note in self.notes():
            if note.endswith(f"/{number}"):
                return int(note.split()[1])
        raise AssertionError(f"worker {number} has not trained:\n{self.text()}")


def assert_good_ending(job: ElasticJob, results: list[dict[str, Any]]) -> None:
    """All ranks have the same state, that of an undisturbed run of the committed steps; all epochs were done; every
    sample was seen as the sampler promises."""
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
        # What repeats is padding, of the last batch of the epoch only: a world that broke repeats nothing committed.
        assert len(seen) - plan["samples"] < max(first["sizes"]) * plan["batch"]


def assert_no_step_lost(job: ElasticJob, results: list[dict[str, Any]]) -> None:
    """Losses, weights and optimizer state are to the last bit those of a training that had the same ranks in the same steps,
    and no failures: no step was applied twice, partly, or by some ranks only."""
    import torch

    import horovod

    first = results[0]
    for result in results:
        for name in ("weights", "momentum", "losses", "worlds"):
            assert result[name] == first[name], f"rank {result['rank']} has another {name} than rank 0"
    losses: list[list[float]] = []
    steps = zip(first["worlds"], first["sizes"], (samples for _, samples in first["seen"]), strict=True)
    for _, its in itertools.groupby(steps, key=lambda step: step[0]):
        _, sizes, samples = zip(*its, strict=True)
        arguments = (str(job.folder), list(samples), not losses)
        losses += horovod.run(call_again, args=arguments, num_proc=sizes[0])[0]
    assert losses == first["losses"]
    saved = torch.load(job.folder / "replay.pt")
    assert torch.cat([value.flatten() for value in saved["net"].values()]).tolist() == first["weights"]
    state = saved["optimizer"]["state"]
    assert [value.double().sum().item() for item in state.values() for value in item.values()] == first["momentum"]


def call_again(folder: str, steps: list[list[int]], first: bool) -> list[list[float]]:
    """On the workers, as `call`."""
    import torch  # noqa: F401
    from elastic_training import train_again

    import horovod.torch  # noqa: F401

    return train_again(folder, steps, first)


def call(plan: dict[str, Any]) -> dict[str, Any]:
    """On the workers. Names torch and horovod.torch, so that they are loaded once for all of them."""
    import torch  # noqa: F401
    from elastic_training import train

    import horovod.torch  # noqa: F401

    return train(plan)


def main() -> None:
    import horovod
    from hora.launch.host import launcher, ssh

    # Hosts that are cut off are noticed sooner than users would like.
    launcher._HEARTBEAT_S, launcher._HEARTBEAT_LIMIT_S = 0.5, 15.0
    ssh._OPTIONS["ServerAliveInterval"] = "5"
    order = json.loads(sys.argv[1])
    results = horovod.run(call, args=(order["plan"],), **order["arguments"])
    print(_RESULT + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
