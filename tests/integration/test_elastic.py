"""Elastic jobs on one host: ranks fail in every way and at every moment, and the training continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from elastic_job import ElasticJob, assert_good_ending, assert_no_step_lost
from job_process import run_command, running

import horovod
from waiting import wait_until

SILENCE_S = 6
SILENCE = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SILENCE_S)}


def fault(rank: int, step: int, how: str, when: str = "step") -> dict[str, object]:
    return {"rank": rank, "step": step, "how": how, "when": when}


@pytest.mark.parametrize("how", ["raise", *(pytest.param(how, marks=pytest.mark.slow) for how in ("exit", "kill"))])
def test_fail_rank_1_of_3_at_step_4(tmp_path: Path, how: str):
    job = ElasticJob(tmp_path, {"faults": [fault(1, 4, how)]}, num_proc=3, min_num_proc=2)
    results = job.results()
    assert_good_ending(job, results)
    assert [result["size"] for result in results] == [2, 2]
    assert [result["worker"] for result in results] == [0, 2]
    assert results[0]["sizes"][:4] == [3, 3, 3, 3]
    assert set(results[0]["sizes"][4:]) == {2}
    entered = {note.split()[1] for note in job.notes()}
    assert len(entered) == 3, "the survivors kept their processes"


def test_fail_rank_0_in_its_commit_and_replace_it(tmp_path: Path):
    """The other ranks continue to train while the new worker starts."""
    plan = {"faults": [fault(0, 5, "kill", "commit")], "epochs": 10**6, "pause_s": 0.1, "preparation_steps": 5}
    job = ElasticJob(tmp_path, plan, num_proc=3, min_num_proc=2, cooldown_range=(1, 2))
    wait_until("worker 3 trains", lambda: any(note.endswith("/3") for note in job.notes()), limit_s=90)
    (job.folder / "last_epoch").touch()
    results = job.results()
    job.plan["epochs"] = results[0]["epoch"]
    assert_good_ending(job, results)
    assert [result["worker"] for result in results][:2] == [1, 2]
    assert 2 in results[0]["sizes"]
    assert results[0]["sizes"][-1] == 3, "the slot came back after its time out"
    (prepared,) = job.notes("prepares")
    assert prepared.endswith("rank 2 of 3 device 0 alone [2.0]")


def test_fail_two_of_four_ranks_at_once(tmp_path: Path):
    plan = {"faults": [fault(0, 3, "kill"), fault(2, 3, "exit")]}
    job = ElasticJob(tmp_path, plan, num_proc=4, min_num_proc=2)
    results = job.results()
    assert_good_ending(job, results)
    assert [result["worker"] for result in results] == [1, 3]


def test_a_stopped_rank_is_dropped_and_ended(tmp_path: Path):
    job = ElasticJob(tmp_path, {"faults": [fault(2, 4, "stop")]}, SILENCE, num_proc=3, min_num_proc=2)
    results = job.results()
    assert_good_ending(job, results)
    assert [result["worker"] for result in results] == [0, 1]
    assert "it does not answer" in job.text()


def test_a_stopped_launcher_does_not_drop_ranks_after_it_resumes(tmp_path: Path):
    job = ElasticJob(tmp_path, {"samples": 4000, "epochs": 1, "pause_s": 0.05}, SILENCE, num_proc=2, min_num_proc=1)
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 2)  # longer than the silence that ranks are allowed
    job.process.send_signal(signal.SIGCONT)
    job.wait_for_step(job.step() + 40)
    (job.folder / "stop").touch()
    assert {size for result in job.results() for size in result["sizes"]} == {2}


def test_per_step_recovery_loses_no_step_in_three_deaths(tmp_path: Path):
    """Rank 0 dies first, and again together with another rank; no commit copies the state in between."""
    faults = [fault(0, 7, "kill"), fault(0, 20, "kill"), fault(2, 20, "kill", "commit")]
    plan = {"per_step": True, "samples": 1000, "steps": 30, "faults": faults}
    job = ElasticJob(tmp_path, plan, num_proc=4, min_num_proc=1)
    results = job.results()
    assert_no_step_lost(job, results)
    assert [result["worker"] for result in results] == [2]
    assert [results[0]["sizes"].count(size) for size in (4, 3, 2, 1)] == [7, 13, 0, 10]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_per_step_recovery_loses_no_step_in_four_deaths(tmp_path: Path, sharded: bool):
    """Rank 0 dies second and fourth; no commit copies the state in between."""
    faults = [fault(1, 7, "kill"), fault(0, 20, "kill"), fault(2, 20, "kill", "commit"), fault(0, 41, "kill")]
    plan = {"per_step": True, "samples": 1000, "steps": 60, "faults": faults, "sharded": sharded}
    job = ElasticJob(tmp_path, plan, num_proc=5, min_num_proc=1)
    results = job.results()
    assert_no_step_lost(job, results)
    assert [result["worker"] for result in results] == [4]
    sizes = results[0]["sizes"]
    assert [sizes.count(size) for size in (5, 4, 3, 2, 1)] == [7, 13, 0, 21, 19]


def test_fit_trains_on_every_row_after_a_rank_dies(tmp_path: Path):
    """Rank 1 of 3 dies in the second epoch. `fit` handles it silently and trains on every row in every epoch."""

    def fit_and_die(folder: str) -> dict[str, object]:
        import torch

        import horovod.torch as hvd
        from hora.workflow import Checkpoints, EarlyStopping, Recipe, Schedule, fit, make_loaders

        hvd.init()
        inputs = torch.arange(61.0).reshape(-1, 1) / 61
        epochs: list[int] = []

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                with open(f"{folder}/seen.{os.getpid()}", "a") as file:
                    file.writelines(f"{os.getpid()} {100 * len(history()) + int(row)}\n" for row in target)
                epochs.append(len(history()))
                if hvd.rank() == 1 and epochs.count(1) == 3 and not os.path.exists(f"{folder}/dead"):
                    Path(f"{folder}/dead").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return (output.squeeze(1) - 2 * target / 61).square().mean()

        def history() -> list[str]:
            return [name for name in os.listdir(folder) if name.endswith(".ckpt")]

        net = torch.nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(inputs, torch.arange(61.0))
        done = fit(
            net,
            make_loaders(data, data, batch_size=4),
            torch.optim.SGD(net.parameters(), lr=0.1),
            loss,
            epochs=3,
            recipe=Recipe(schedule=Schedule()),
            checkpoints=Checkpoints(folder, keep=10),
            early_stopping=EarlyStopping(patience=3, restore_best=False),
            progress=False,
        )
        return {
            "size": hvd.size(),
            "weights": [p.tolist() for p in net.parameters()],
            "epochs": done.column("epoch"),
            "rate": done.last("lr"),
            "loss": done.column("train_loss"),
        }

    results = horovod.run(fit_and_die, args=(str(tmp_path),), num_proc=3, min_num_proc=2)
    assert [result["size"] for result in results] == [2, 2]
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["epochs"] == [1.0, 2.0, 3.0]
        assert result["rate"] == 0.1 * 2, "the schedule knows how many there are"
    seen = [line.split() for file in tmp_path.glob("seen.*") for line in file.read_text().splitlines()]
    assert len({pid for pid, _ in seen}) == 3
    for epoch in range(3):
        rows = [int(row) for _, row in seen if int(row) // 100 == epoch]
        assert {row % 100 for row in rows} == set(range(61))
        assert len(rows) <= 61 + 3 * 4 + 3 * 4, "no row twice but those of the step that failed, and padding"
    assert (tmp_path / "dead").exists()
    assert results[0]["loss"][2] < results[0]["loss"][0]


def test_ranks_cut_off_from_the_launcher_for_five_seconds_continue_to_train(tmp_path: Path):
    faults = [fault(0, 3, "cut off"), fault(1, 4, "cut off")]
    job = ElasticJob(tmp_path, {"faults": faults, "pause_s": 0.5, "per_step": True}, num_proc=2, min_num_proc=1)
    results = job.results()
    assert_good_ending(job, results)
    assert set(results[0]["sizes"]) == {2}
    assert len(job.notes()) == 2, "no world but the first"


def test_the_job_fails_with_fewer_ranks_than_min_np(tmp_path: Path):
    job = ElasticJob(tmp_path, {"faults": [fault(0, 3, "kill"), fault(1, 3, "raise")]}, num_proc=3, min_num_proc=2)
    assert job.wait() == 1
    job.assert_nothing_left()
    text = job.text()
    assert "Horovod detected that one or more processes exited with non-zero status" in text
    assert "Process name: localhost[" in text
    assert "--min-np is 2" in text


def test_the_reset_limit_ends_the_job(tmp_path: Path):
    plan = {"faults": [fault(2, 3, "kill"), fault(1, 6, "kill")]}
    job = ElasticJob(tmp_path, plan, num_proc=3, min_num_proc=1, reset_limit=1)
    assert job.wait() == 1
    job.assert_nothing_left()
    assert "number of resets during elastic job exceeded limit: 1" in job.text()
    assert [note.split()[4:6] for note in job.notes()][-1] == ["of", "2"] or "of 2" in " ".join(job.notes())


def test_a_worker_killed_during_recovery_from_another_death(tmp_path: Path):
    """The second death hits at any moment of the recovery from the first."""
    plan = {"faults": [fault(3, 3, "kill")], "epochs": 3, "pause_s": 0.05}
    job = ElasticJob(tmp_path, plan, num_proc=4, min_num_proc=2)
    job.wait_for_step(2)
    victim = job.worker(1)
    job.wait_for_text("failed with exit code 137")
    os.kill(victim, signal.SIGKILL)
    results = job.results()
    assert_good_ending(job, results)
    assert [result["worker"] for result in results] == [0, 2]


def test_a_sharded_optimizer_loses_no_slice(tmp_path: Path):
    """Every survivor's commit contains the whole state, including the slice of the dead rank."""
    plan = {"sharded": True, "epochs": 3, "faults": [fault(0, 4, "kill")]}
    job = ElasticJob(tmp_path, plan, num_proc=3, min_num_proc=2)
    results = job.results()
    assert_good_ending(job, results)
    assert all(value != 0 for value in results[0]["momentum"])


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_diloco_replaces_a_dead_host_with_one_that_copies_the_outer_state(tmp_path: Path, rank: int):
    """Over TCP every rank is a host, with its own parameters between two exchanges."""
    plan = {"diloco": True, "epochs": 5, "pause_s": 0.1, "faults": [fault(rank, 6, "kill")]}
    tcp = {"HORA_TRANSPORT": "tcp"}
    job = ElasticJob(tmp_path, plan, tcp, num_proc=3, min_num_proc=2, cooldown_range=(1, 2))
    results = job.results()
    first = results[0]
    assert {2, 3} == set(first["sizes"])
    assert first["sizes"][-1] == 3, "the slot came back after its time out"
    assert first["outer"] == 3 * first["outer"][:1], "the newcomer has another outer state, or other parameters"
    assert first["outer"][0][0] == first["steps"], "all counted on from what was committed"
    assert all(value != 0 for value in first["outer"][0])
    for result in results:
        for name in ("weights", "epoch", "steps", "seen", "sizes"):
            assert result[name] == first[name], f"rank {result['rank']} has another {name} than rank 0"
    assert first["epoch"] == plan["epochs"]


def test_the_next_job_resumes_from_the_last_durable_commit_after_all_ranks_die(tmp_path: Path):
    durable = str(tmp_path / "commits")
    plan = {"durable": durable, "pause_s": 0.1}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    faults = [fault(rank, 6, "kill") for rank in range(2)]
    first = ElasticJob(tmp_path / "first", plan | {"faults": faults}, num_proc=2, min_num_proc=1)
    assert first.wait() == 1
    first.assert_nothing_left()
    assert len(list(Path(durable).glob("*.json"))) == 3
    second = ElasticJob(tmp_path / "second", plan, num_proc=2, min_num_proc=1)
    results = second.results()
    assert_good_ending(second, results)
    (step,) = {int(note.split("at step ")[1].split()[0]) for note in second.notes()}
    assert 1 <= step <= 6, "it went on where the first job was"


def test_a_command_without_elastic_support():
    assert run_command("horovodrun", "-np", "2", "--min-np", "1", "true")[0] == 0
    code, _, err = run_command("horovodrun", "-np", "2", "--min-np", "1", "sh", "-c", "exit 3")
    assert code == 1
    assert "Process name: localhost[" in err
    assert "Exit code: 3" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_the_launcher_ends(tmp_path: Path, number: signal.Signals):
    command = ["horovodrun", "-np", "2", "--min-np", "1", "sh", "-c", f"touch {tmp_path}/$HOROVOD_RANK; sleep 300"]
    with running(*command, ready=tmp_path, count=2) as launcher:
        launcher.process.send_signal(number)
        assert launcher.finish()[0] != 0
