"""Packages that are written for torch.distributed give the same results on two ranks as on gloo, and survive a death.

Those that train do four steps, then load the checkpoint of step two into new objects and repeat steps three and four.
Each program prints the group's class and two lists of tensors, of both runs if it trains. `make test-torch-distributed`
installs the packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from job_process import run_command

pytestmark = pytest.mark.slow

PRELUDE = """
import json, os, signal, sys
import torch
import torch.distributed as dist

folder, backend = sys.argv[1], sys.argv[2]
num_ranks, num_steps = int(os.environ["WORLD_SIZE"]), 0


def die(*_):
    global num_steps
    num_steps += 1
    if num_steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("HORA_ELASTIC_PER_STEP") and os.environ["RANK"] == "1":
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(die)


def samples():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 4, generator=generator)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def tell(first, second):
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, [tensor.sum().item() for tensor in [*first, *second]])
    assert of_all.count(of_all[0]) == len(of_all), "the ranks have other weights"
    if dist.get_rank() == 0:
        lists = [[tensor.detach().flatten().tolist() for tensor in tensors] for tensors in (first, second)]
        print("RESULT", json.dumps([type(dist.group.WORLD).__name__, *lists]), flush=True)
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)


def train(first, last, resumed):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumed:
        accelerator.load_state(folder)
    for step in range(first, last):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
        if step == 1:
            accelerator.save_state(folder)
    if dist.get_world_size() == num_ranks:
        assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [*range(num_ranks)]
    weights = list(accelerator.unwrap_model(model).parameters())
    accelerator.free_memory()
    return weights


tell(train(0, 4, False), train(2, 4, True))
dist.destroy_process_group()
"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def train(checkpoint):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    texts = [{"input_ids": [(7 * i + j) % 32 for j in range(8)], "labels": [(7 * i + j) % 32 for j in range(8)]}
             for i in range(16)]
    arguments = TrainingArguments(folder, use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=2,
                                  learning_rate=0.01, report_to=[], disable_tqdm=True, logging_steps=4)
    trainer = Trainer(model=model, args=arguments, train_dataset=texts)
    trainer.train(resume_from_checkpoint=checkpoint)
    return list(model.parameters())


tell(train(None), train(f"{folder}/checkpoint-2"))
dist.destroy_process_group()
"""

LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

sharded = sys.argv[3] == "fsdp"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def configure_model(self):
        if sharded and not isinstance(self.net[0].weight, torch.distributed.tensor.DTensor):
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(samples(), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def train(checkpoint=None):
    if sharded:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend=backend)
    else:
        strategy = DDPStrategy(process_group_backend=backend)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(accelerator="cpu", devices=num_ranks, strategy=strategy, max_steps=4, logger=False,
                                enable_progress_bar=False, enable_model_summary=False, callbacks=[saving])
    module = Module()
    trainer.fit(module, ckpt_path=checkpoint)
    whole = [getattr(value, "full_tensor", lambda: value)() for value in module.parameters()]
    return [value.clone() for value in whole]


tell(train(), train(f"{folder}/step=2.ckpt"))
"""

FABRIC = """
import lightning
from lightning.fabric.strategies import DDPStrategy

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
fabric.launch()


def train(first, last, resumed):
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=8))
    state = {"model": model, "optimizer": optimizer}
    if resumed:
        fabric.load(f"{folder}/state.ckpt", state)
    for step in range(first, last):
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            optimizer.step()
        if step == 1:
            fabric.save(f"{folder}/state.ckpt", state)
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
    return list(model.parameters())


tell(train(0, 4, False), train(2, 4, True))
"""

TORCHMETRICS = """
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group(backend)
rank = dist.get_rank()


def measured():
    accuracy, mean, values = MulticlassAccuracy(3), MeanMetric(), CatMetric()
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        accuracy.update(torch.randn(4, 3, generator=generator), torch.randint(3, (4,), generator=generator))
        mean.update(torch.tensor(float(rank + step)))
        values.update(torch.arange(1.0 + rank + step))  # each rank has another number of them
    return [accuracy.compute(), mean.compute(), values.compute()]


tell(measured(), measured())
dist.destroy_process_group()
"""

IGNITE = """
import ignite.distributed as idist


def work(local_rank):
    rank = idist.get_rank()
    exchanged = [
        idist.all_reduce(torch.tensor(rank + 1.0)),
        idist.all_gather(torch.tensor([float(rank)])),
        idist.broadcast(torch.tensor([rank + 5.0]), src=1),
        torch.tensor([float(len(text)) for text in idist.all_gather("x" * (rank + 1))]),
    ]
    model = idist.auto_model(network())
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.05))
    for batch in idist.auto_dataloader(samples(), batch_size=4, shuffle=False):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    idist.barrier()
    tell(exchanged, model.parameters())


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(work)
"""

TRAINING = (ACCELERATE, TRAINER, LIGHTNING, FABRIC)


def _result(folder, program: str, *arguments: str, replaced: bool) -> tuple[str, list, list]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    hora = str(Path(sys.executable).with_name("hora"))
    command = [hora, "run", "-np", "2", *(["--replace-gloo"] if replaced else [])]
    done = subprocess.run(
        [*command, sys.executable, str(script), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "RESULT " in line)
    return tuple(json.loads(line.partition("RESULT ")[2]))


@pytest.mark.parametrize(
    ("package", "program", "arguments"),
    [
        pytest.param("accelerate", ACCELERATE, (), id="accelerate"),
        pytest.param("transformers", TRAINER, (), id="trainer"),
        pytest.param("lightning", LIGHTNING, ("ddp",), id="lightning-ddp"),
        pytest.param("lightning", LIGHTNING, ("fsdp",), id="lightning-fsdp"),
        pytest.param("lightning", FABRIC, (), id="fabric"),
        pytest.param("torchmetrics", TORCHMETRICS, (), id="torchmetrics"),
        pytest.param("ignite", IGNITE, (), id="ignite"),
    ],
)
def test_the_package_gives_the_results_of_gloo(package, program, arguments, tmp_path):
    if importlib.util.find_spec(package) is None or (package == "transformers" and not _has("accelerate")):
        pytest.skip(f"needs {package}: make test-torch-distributed")
    by_name = package in ("lightning", "torchmetrics")  # the other packages hard-code their backend for CPUs
    kind, first, second = _result(tmp_path / "hora", program, "hora", *arguments, replaced=not by_name)
    assert kind == "HoraProcessGroup"
    of_gloo, *expected = _result(tmp_path / "gloo", program, "gloo", *arguments, replaced=False)
    assert of_gloo == "ProcessGroup"
    for found, wanted in zip((first, second), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    if program in TRAINING:
        assert _flat(second) == pytest.approx(_flat(first), rel=1e-4, abs=1e-5), "resumed"


def _flat(tensors: list[list[float]]) -> list[float]:
    return [value for one in tensors for value in one]


@pytest.mark.parametrize(
    ("package", "program", "arguments"),
    [
        pytest.param("accelerate", ACCELERATE, (), id="accelerate"),
        pytest.param("transformers", TRAINER, (), id="trainer"),
        pytest.param("lightning", LIGHTNING, ("ddp",), id="lightning"),
    ],
)
def test_the_package_goes_on_without_a_dead_rank(package, program, arguments, tmp_path):
    if not _has(package) or (package == "transformers" and not _has("accelerate")):
        pytest.skip(f"needs {package}: make test-torch-distributed")
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + program)
    options = ["-np", "3", "--min-np", "2", "--replace-gloo"]
    command = ["hora", "run", *options, sys.executable, str(script), str(tmp_path), "hora", *arguments]
    variables = {"HORA_ELASTIC_PER_STEP": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    status, output, errors = run_command(*command, env=variables)
    assert status == 0, output + errors
    assert "2 ranks go on after" in errors
    assert "RESULT" in output


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
