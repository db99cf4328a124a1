"""Accelerate, the Hugging Face Trainer and Lightning on two ranks match gloo, also after a resume, and survive a death.

Each program trains four steps, then loads the checkpoint of step two into new objects and repeats steps three and four.
It prints the group's class and the weights of both runs. `make test-torch-distributed` installs the packages.
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
    ],
)
def test_the_package_trains_and_resumes_as_on_gloo(package, program, arguments, tmp_path):
    if importlib.util.find_spec(package) is None or (package == "transformers" and not _has("accelerate")):
        pytest.skip(f"needs {package}: make test-torch-distributed")
    by_name = package == "lightning"  # the other packages hard-code their backend for CPUs
    kind, trained, resumed = _result(tmp_path / "hora", program, "hora", *arguments, replaced=not by_name)
    assert kind == "HoraProcessGroup"
    of_gloo, expected, _ = _result(tmp_path / "gloo", program, "gloo", *arguments, replaced=False)
    assert of_gloo == "ProcessGroup"
    for what, found in (("trained", trained), ("resumed", resumed)):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), what


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
