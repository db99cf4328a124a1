"""Engine defects that were found by external tests, as scripts that a user starts with `horovodrun`.

`make test` has faster tests of the same defects; these use public names only. `make test-security` runs them.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from job_process import lines_of, run_command

pytestmark = pytest.mark.security


def said_by(tmp_path: Path, num_ranks: int, script: str, *options: str, **environment: str) -> list[list[str]]:
    """Run the script on so many ranks, all of which must succeed; return the lines printed by each."""
    path = tmp_path / "script.py"
    path.write_text("import horovod.torch as hvd, torch\n" + textwrap.dedent(script))
    line = ["horovodrun", *options, "-np", str(num_ranks), sys.executable, str(path)]
    status, out, err = run_command(*line, env={"OMP_NUM_THREADS": "1", **environment})
    assert status == 0, out + err
    return [lines_of(out, rank) for rank in range(num_ranks)]


def test_half_precision_sums_are_accumulated_in_float32(tmp_path: Path):
    script = """
    hvd.init()
    mine = torch.full((4,), 1.0 if hvd.rank() == 0 else 2**-8, dtype=torch.bfloat16)
    large = torch.full((4,), 40000.0, dtype=torch.float16)
    whole = torch.tensor([2**50, -3, 5])
    print(hvd.allreduce(mine, op=hvd.Sum)[0].item(), hvd.allreduce(large)[0].item(), hvd.allreduce(whole).tolist())
    weights = torch.nn.Parameter(torch.zeros(300_000, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), named_parameters=[("w", weights)])
    for _ in range(3):
        optimizer.zero_grad()
        (weights * torch.tensor(2**-24, dtype=torch.float16)).sum().backward()
        optimizer.synchronize()
        print(weights.grad[0].item() == 2**-24)
        with optimizer.skip_synchronize():
            optimizer.step()
    """
    for lines in said_by(tmp_path, 8, script):  # 1 + 7 / 256 in eight bits; 1 if rounded every time
        assert lines == [f"1.03125 40000.0 [{2**50}, -3, 5]", "True", "True", "True"]


@pytest.mark.parametrize("mode", ["torch.set_default_device('meta')", "torch.inference_mode().__enter__()"])
def test_another_default_device_and_inference_mode_do_not_end_the_world(tmp_path: Path, mode: str):
    script = f"""
    import time
    hvd.init()
    {mode}
    values = torch.ones(100, device="cpu")
    handle = hvd.allreduce_async_(values, name="x", op=hvd.Sum)
    time.sleep(0.3)  # the thread in the background does it
    print(hvd.synchronize(handle)[0].item(), hvd.allreduce_(torch.ones(3, device="cpu"), op=hvd.Sum)[0].item())
    """
    assert said_by(tmp_path, 2, script) == [["2.0 2.0"]] * 2


def test_forked_children_keep_their_rank_and_their_copy_of_the_weights(tmp_path: Path):
    script = """
    import os
    from torch.utils.data import DataLoader, IterableDataset

    class Shares(IterableDataset):
        def __iter__(self):
            return iter(range(hvd.rank(), 8, hvd.size()))

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    hvd.init()
    print([int(one) for one in DataLoader(Shares(), num_workers=1, batch_size=None)])
    model = torch.nn.Linear(64, 64)
    names = model.named_parameters()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=names, sharded=True)
    step()
    before = model.weight.detach().clone()
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(mine, 1)  # until the parent has taken another step
        os._exit(0 if torch.equal(model.weight, before) else 1)
    step()
    os.close(theirs)
    print(os.waitpid(child, 0)[1], torch.equal(model.weight, before))
    """
    assert said_by(tmp_path, 2, script) == [["[0, 2, 4, 6]", "0 False"], ["[1, 3, 5, 7]", "0 False"]]


def test_join_does_not_change_the_scaling_of_a_pending_prescaled_operation(tmp_path: Path):
    script = """
    import time
    hvd.init()
    wrong = 0
    for number in range(30):
        first, second = torch.full((4,), 8.0), torch.full((4,), 8.0)
        hvd.barrier()
        if hvd.rank() == 0:
            time.sleep(0.02)  # so that both become ready in one round
        handles = [hvd.allreduce_async_(first, name=f"x{number}", op=hvd.Sum, prescale_factor=0.5)]
        if hvd.rank() == 0:
            handles.append(hvd.allreduce_async_(second, name=f"y{number}", op=hvd.Sum, prescale_factor=0.5))
            for handle in handles:
                hvd.synchronize(handle)
            hvd.join()
        else:
            hvd.join()
            hvd.synchronize(handles[0])
        wrong += first[0].item() != 8.0
    print(wrong)
    """
    assert said_by(tmp_path, 2, script) == [["0"], ["0"]]


def test_twenty_thousand_operations_in_opposite_orders(tmp_path: Path):
    script = """
    hvd.init()
    tensors = [torch.full((2,), float(number)) for number in range(20_000)]
    order = range(20_000) if hvd.rank() == 0 else reversed(range(20_000))
    names = "some.rather.long.name.of.a.parameter."
    handles = {number: hvd.allreduce_async_(tensors[number], op=hvd.Sum, name=f"{names}{number}") for number in order}
    for handle in handles.values():
        hvd.synchronize(handle)
    print(all(tensor[0].item() == 2.0 * number for number, tensor in enumerate(tensors)))
    """
    assert said_by(tmp_path, 2, script) == [["True"], ["True"]]


def test_a_set_is_removed_with_operations_in_flight(tmp_path: Path):
    script = """
    import threading
    hvd.init(process_sets="dynamic")
    odd = []
    for number in range(15):
        some = hvd.add_process_set(hvd.ProcessSet([0, 1]))
        values = torch.ones(200_000)
        handle = hvd.allreduce_async_(values, name="x", process_set=some, op=hvd.Sum) if hvd.rank() < 2 else None
        hvd.remove_process_set(some)
        if handle is not None:
            try:
                hvd.synchronize(handle)
                odd += [] if values[0].item() == 2.0 else [values[0].item()]
            except (ValueError, hvd.HorovodInternalError) as error:
                odd += [] if "remove" in str(error) else [str(error)]
        hvd.barrier()
    print(odd, threading.active_count() < 20)
    """
    assert said_by(tmp_path, 3, script) == [["[] True"]] * 3


def test_a_signal_handler_may_shut_down_at_any_moment(tmp_path: Path):
    """Rank 1 is interrupted repeatedly at random moments; both ranks initialize again each time."""
    script = """
    import random, signal

    class Interrupted(Exception):
        pass

    def shut_down(*_):
        hvd.shutdown()
        raise Interrupted

    signal.signal(signal.SIGALRM, shut_down)
    rng, values, ended = random.Random(7), torch.ones(4), 0
    for number in range(25):
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.02))
        try:
            while True:
                hvd.allreduce_(values, op=hvd.Average)
        except (Interrupted, hvd.HorovodInternalError, ValueError):
            ended += 1
        hvd.shutdown()
    print(ended)
    """
    assert said_by(tmp_path, 2, script, HOROVOD_LOG_LEVEL="error") == [["25"], ["25"]]


def test_a_timeout_of_a_month_works(tmp_path: Path):
    script = """
    import os, time
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(2)  # the other one waits for it
    hvd.init()
    print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    """
    assert said_by(tmp_path, 2, script, "--gloo-timeout-seconds", "3000000") == [["2.0"], ["2.0"]]


@pytest.mark.parametrize("sharded", [False, True])
def test_elastic_training_without_failures_matches_one_process(tmp_path: Path, sharded: bool):
    script = f"""
    hvd.init()
    def network():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    alone, model = network(), network()
    other = torch.optim.Adam(alone.parameters(), lr=1e-2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), sharded={sharded})
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            rows = 12 // hvd.size()
            data = torch.randn(12, 6, generator=torch.Generator().manual_seed(state.step))
            mine = data[hvd.rank() * rows : (hvd.rank() + 1) * rows]
            for net, steps, inputs in ((alone, other, data), (model, optimizer, mine)):
                steps.zero_grad()
                net(inputs).square().mean().backward()
                steps.step()
            state.step += 1
            state.commit()
    train(state)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    counts = [entry["step"].item() for entry in optimizer.state_dict()["state"].values()]
    print(max((one - same).abs().max().item() for one, same in pairs) < 1e-6, set(counts))
    """
    assert said_by(tmp_path, 3, script, "--min-np", "2") == [["True {6.0}"]] * 3
