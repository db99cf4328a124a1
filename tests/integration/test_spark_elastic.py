"""`horovod.spark.run_elastic` on a real standalone cluster: failures, and a lost executor."""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
import threading

import pytest

import horovod.spark
from sparkdl import HorovodRunner

pytestmark = pytest.mark.spark


def train(failures, directory):
    """Train five epochs of a sum that is right only if every step counts once. `failures`: epoch -> rank."""
    import os

    import torch

    import horovod.torch as hvd

    hvd.init()
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def loop(state):
        while state.epoch < 5:
            once = os.path.join(directory, f"failed-{state.epoch}")
            if failures.get(state.epoch) == hvd.rank() and not os.path.exists(once):
                open(once, "w").close()
                print(f"failing in epoch {state.epoch}", flush=True)
                os._exit(3) if state.epoch % 2 else exec("raise RuntimeError('planned')")
            optimizer.zero_grad()
            (net(torch.ones(1, 1)) * (state.epoch + 1)).sum().backward()
            optimizer.step()
            state.epoch += 1
            state.commit()

    loop(state)
    return hvd.rank(), hvd.size(), net.weight.item()


@pytest.mark.slow
def test_three_failures_do_not_change_the_result(spark, spark_cluster, by_value, tmp_path):
    arguments = {"num_proc": 2, "elastic_timeout": 100, "verbose": 0}
    disturbed = horovod.spark.run_elastic(train, args=({1: 1, 2: 0, 3: 1}, str(tmp_path)), **arguments)
    assert disturbed == [(0, 2, -15.0), (1, 2, -15.0)]
    assert len(list(tmp_path.iterdir())) == 3
    assert spark_cluster.leftovers() == []


def until_killed(directory):
    """Train until an executor was killed, and 20 steps more."""
    import os

    import torch

    import horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    hvd.init()
    state = hvd.elastic.TorchState(step=0, rest=20)

    @hvd.elastic.run
    def loop(state):
        while state.rest:
            killed = float(os.path.exists(os.path.join(directory, "killed")))
            # All ranks see the file in the same step.
            state.rest -= bool(hvd.allreduce(torch.tensor(killed), name="killed", op=hvd.Max))
            state.step += 1
            state.commit()
            if state.step == 10:
                log_to_driver("half way")

    loop(state)
    return state.rest, hvd.rank()


@pytest.mark.parametrize("how", ["run_elastic", pytest.param("HorovodRunner", marks=pytest.mark.slow)])
def test_a_lost_executor_does_not_end_the_training(how, spark, spark_cluster, by_value, tmp_path):
    def kill():
        spark_cluster.executors()[0].kill()
        (tmp_path / "killed").touch()

    class Watch(io.StringIO):
        def write(self, data):
            if "half way" in data and not killed.is_set():
                killed.set()
                threading.Thread(target=kill).start()
            return len(data)

    killed = threading.Event()
    assert HorovodRunner(np=2).run(lambda: "both slots are there") == "both slots are there"
    with contextlib.redirect_stdout(Watch()):
        if how == "run_elastic":
            directory = str(tmp_path)
            results = horovod.spark.run_elastic(until_killed, args=(directory,), num_proc=2, min_num_proc=1, verbose=0)
            assert results[0] == (0, 0)
        else:
            assert HorovodRunner(np=2).run(until_killed, directory=str(tmp_path)) == (0, 0)
    assert killed.is_set()
    assert spark_cluster.leftovers() == []


def until_alone():
    """Train until this rank is alone, and some steps more; return the restored steps, the progress and `alone`."""
    import torch

    import horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    restored = []

    class State(hvd.elastic.TorchState):
        def restore(self):
            restored.append(self.step)
            super().restore()

    hvd.init()
    state = State(step=0, alone=0)

    @hvd.elastic.run
    def loop(state):
        while state.alone < 5:
            hvd.allreduce(torch.ones(1), name="step")
            state.alone += hvd.size() == 1
            state.step += 1
            state.commit()
            if state.step == 10:
                log_to_driver("half way")

    loop(state)
    return restored, state.step > 10, state.alone


def test_ranks_on_a_decommissioned_executor_commit_and_leave(spark, spark_cluster, by_value):
    class Watch(io.StringIO):
        def write(self, data):
            if "half way" in data and not sent.is_set():
                sent.set()
                spark_cluster.executors()[0].send_signal(signal.SIGPWR)
            return len(data)

    sent = threading.Event()
    assert HorovodRunner(np=2).run(lambda: "both slots are there") == "both slots are there"
    with contextlib.redirect_stdout(Watch()):
        (result,) = horovod.spark.run_elastic(until_alone, num_proc=2, min_num_proc=1, verbose=0)
    assert result == ([], True, 5)  # no step was lost, so the state was not restored
    assert spark_cluster.leftovers() == []


def until_replaced():
    """Train until all ranks run in later task attempts with the first ones' state; return whether both happened."""
    import os
    import time

    import torch

    import horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    hvd.init()
    attempt = float(os.environ["HOROVOD_HOSTNAME"].rpartition("-")[2])
    state = hvd.elastic.TorchState(step=0, replaced=False)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.step)
        while not state.replaced and state.step < 5000:
            oldest = hvd.allreduce(torch.tensor([attempt]), name="step", op=hvd.Min).item()
            state.replaced = oldest > 1 and hvd.size() == 2
            state.step += 1
            time.sleep(0.02)
            state.commit()
            if state.step == 10:
                log_to_driver("half way")

    loop(state)
    return state.replaced, entered[0] > 10


@pytest.mark.slow
def test_the_state_moves_to_new_executors_when_all_are_decommissioned_at_once(spark, spark_cluster, by_value):
    """No core is free: a new executor starts only after an old one has exited."""

    class Watch(io.StringIO):
        def write(self, data):
            if "half way" in data and not sent.is_set():
                sent.set()
                for executor in spark_cluster.executors():
                    executor.send_signal(signal.SIGPWR)
            return len(data)

    sent = threading.Event()
    assert HorovodRunner(np=2).run(lambda: "both slots are there") == "both slots are there"
    with contextlib.redirect_stdout(Watch()):
        results = horovod.spark.run_elastic(until_replaced, num_proc=2, min_num_proc=1, verbose=0)
    assert results == [(True, True)] * 2
    assert spark_cluster.leftovers() == []


def test_signature_and_bad_requests(spark):
    assert " ".join(inspect.signature(horovod.spark.run_elastic).parameters) == (
        "fn args kwargs num_proc min_num_proc max_num_proc start_timeout elastic_timeout reset_limit env stdout "
        "stderr verbose nics prefix_output_with_timestamp min_np max_np"
    )
    with pytest.raises(ValueError, match="min_num_proc=3"):
        horovod.spark.run_elastic(train, num_proc=2, min_num_proc=3)
    with pytest.warns(DeprecationWarning, match="max_np"), pytest.raises(ValueError, match="max_num_proc=1"):
        horovod.spark.run_elastic(train, num_proc=2, max_np=1)
