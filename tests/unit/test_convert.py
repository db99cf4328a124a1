"""`hora init --from`: each edit of a single-process script, and the notes on lines that it leaves unchanged."""

from __future__ import annotations

import pytest

from hora.cli.convert import Converted
from hora.cli.dispatch import main

SCRIPT = '''\
"""Ümlaute before the edits: positions are bytes."""
from __future__ import annotations

from torch import nn, optim, save
import torch.utils.data as data


def main(rows, device="cuda:0"):
    loader = data.DataLoader(list(rows), batch_size=2, shuffle=True)
    valid = data.DataLoader(rows, shuffle=False)
    model = nn.Linear(4, 2).to(device)
    optimizer = optim.SGD(model.parameters(),
                          lr=0.1)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    for fold in range(2):
        for epoch in range(3):
            for batch in loader:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
        save(
            model.state_dict(),
            "ü.pt",
        )


if __name__ == "__main__":
    main([])
'''

CONVERTED = '''\
"""Ümlaute before the edits: positions are bytes."""
from __future__ import annotations

from torch import nn, optim, save
import torch.utils.data as data
import torch
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def main(rows, device="cuda:0"):
    loader = data.DataLoader((loader_rows := list(rows)), batch_size=2, \
sampler=DistributedSampler(loader_rows, num_replicas=hvd.size(), rank=hvd.rank()))
    valid = data.DataLoader(rows, shuffle=False)
    model = nn.Linear(4, 2).to(device)
    optimizer = optim.SGD(model.parameters(),
                          lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # averages the gradients
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start from rank 0's
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    for fold in range(2):
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)  # another order of rows
            for batch in loader:
                hvd.clip_grad_norm_(model.parameters(), 1.0)
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
        if hvd.rank() == 0:  # one rank writes
            save(
                model.state_dict(),
                "ü.pt",
            )


if __name__ == "__main__":
    hvd.init()  # learns this process's place in the job; alone it is rank 0 of 1
    if torch.cuda.is_available():  # one GPU for each process of a machine
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    main([])
'''


def test_a_script_with_a_main_function():
    converted = Converted(SCRIPT)
    assert converted.text == CONVERTED
    notes = "\n".join(converted.notes)
    assert "line 19: clips gradients" in notes
    assert "no torch.manual_seed" in notes
    assert "learning rate" in notes


def test_a_script_without_functions_starts_after_its_imports():
    text = "import torch\nfrom torch.utils.data import DataLoader\nnet = torch.nn.Linear(1, 1)\n"
    text += "loader = DataLoader(rows, shuffle=True if big else False)\n"
    text += 'net.to("cuda:1")\noptimizer = torch.optim.Adam([{"params": net.parameters()}])\n'
    text += "while True: torch.save(net, 'x')"
    converted = Converted(text)
    lines = converted.text.splitlines()
    assert lines[6] == "hvd.init()  # learns this process's place in the job; alone it is rank 0 of 1"
    assert "rank=hvd.rank(), shuffle=True if big else False))" in converted.text
    assert "optimizer = hvd.DistributedOptimizer(optimizer)  # averages the gradients" in lines
    notes = "\n".join(converted.notes)
    for words in ("line 4: call loader.sampler.set_epoch", 'line 5: names one GPU for all ranks: write "cuda"',
                  "line 6: add hvd.broadcast_parameters", "line 7: let rank 0 alone save"):  # fmt: skip
        assert words in notes


def test_loaders_that_cannot_be_sharded_are_noted():
    text = "import torch\noptimizer = torch.optim.SGD(net.parameters())\n"
    text += "loader = torch.utils.data.DataLoader(rows, **options)\n"
    assert "line 3: every rank reads all rows of loader" in "\n".join(Converted(text).notes)


TRAINING = """\
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
steps = torch.optim.lr_scheduler.StepLR(optimizer, 1)
writer = SummaryWriter()
for epoch in range(100):
    for batch in tqdm(rows):
        if batch is None:
            break
        optimizer.step()
    if epoch == 90:
        break
    plateau.step(validate())
    steps.step()
    if stopping.update(validate()):
        log(epoch)
        break
path.write_text("done")
"""


def test_what_one_rank_would_decide_or_write_is_noted():
    notes = "\n".join(Converted(TRAINING).notes)
    for words in (
        "line 7: every rank would write: let rank 0 alone call SummaryWriter",
        "line 9: every rank would draw a progress bar: tqdm(…, disable=hvd.rank() != 0)",
        "line 15: each rank would set its own learning rate",
        "hvd.allreduce(torch.tensor(validate())).item()",
        "line 17: ends this rank's loop by its own result",
        "line 20: every rank would write: let rank 0 alone call write_text",
    ):
        assert words in notes
    for line in (10, 13, 16):  # within an epoch; by the number of the epoch; a schedule that sees no loss
        assert f"line {line}:" not in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nimport horovod.torch as hvd\n", "distributed already"),
        ("import torch\nnet = torch.nn.Linear(1, 1)\n", "no line such as `optimizer = torch.optim.SGD"),
    ],
)
def test_scripts_that_cannot_be_converted(text, words):
    with pytest.raises(ValueError, match=words):
        Converted(text)


def test_the_command(tmp_path, capsys):
    plain, distributed = tmp_path / "plain.py", tmp_path / "distributed.py"
    plain.write_text(SCRIPT)
    assert main(["init", "--from", str(plain), str(distributed)]) == 0
    assert distributed.read_text() == CONVERTED
    out = capsys.readouterr().out
    assert f"run it: hora run -np 2 python {distributed}" in out
    assert f"{plain}, line 19: clips gradients" in out
    assert main(["init", "--from", str(tmp_path / "absent.py"), str(tmp_path / "new.py")]) == 2
    plain.write_text("import (")
    assert main(["init", "--from", str(plain), str(tmp_path / "new.py")]) == 2
    assert "invalid syntax" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["init", "--from", str(plain), "--sharded", str(tmp_path / "new.py")])
    assert "leave --sharded out" in capsys.readouterr().err
