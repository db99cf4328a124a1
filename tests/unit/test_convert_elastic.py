"""`hora init --from --elastic`: the script with DDP and `protect`, and the notes on lines that it leaves unchanged."""

from __future__ import annotations

import pytest

from hora.cli.convert_elastic import ElasticConverted
from hora.cli.dispatch import main

SCRIPT = """\
import torch
from torch.utils.data import DataLoader


def main(rows, start=0):
    loader = DataLoader(rows, batch_size=2, shuffle=True)
    model = torch.nn.Linear(4, 2).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cuda")
    if start:
        model.load_state_dict(torch.load("model.pt"))
    print(model.in_features)
    for epoch in range(start, 3):
        for batch in loader:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main([])
"""

CONVERTED = """\
import torch
from torch.utils.data import DataLoader
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hora.elastic


def main(rows, start=0):
    loader = DataLoader(rows, batch_size=2, sampler=hora.elastic.ElasticSampler(rows))
    model = torch.nn.Linear(4, 2).to("cuda")
    model = DistributedDataParallel(model)  # averages the gradients while backward runs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cuda")
    if start:
        model.module.load_state_dict(torch.load("model.pt"))
    print(model.module.in_features)
    hora.elastic.protect(model, optimizer, scheduler=[scheduler, scaler], sampler=loader.sampler)  \
# a death costs no step
    for epoch in range(max(start, loader.sampler.epoch), 3):
        loader.sampler.set_epoch(epoch)  # another order of rows
        for batch in loader:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        if dist.get_rank() == 0:  # one rank writes
            torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    dist.init_process_group("hora")  # learns this process's place in the job
    if torch.cuda.is_available():  # one GPU for each process of a machine
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    main([])
    dist.destroy_process_group()  # waits until every rank has completed the training
"""


def test_a_script_with_a_main_function():
    converted = ElasticConverted(SCRIPT)
    assert converted.text == CONVERTED
    assert "multiply the rate by dist.get_world_size()" in "\n".join(converted.notes)


SCATTERED = """\
import torch
from torch.utils.data import DataLoader
def load(rows):
    return rows
def make_loader(rows):
    loader = DataLoader(load(rows), shuffle=True)
    return loader
def save(net):
    torch.save(net.state_dict(), "net.pt")
net, rival = make(), make()
one = torch.optim.Adam(net.parameters())
two = torch.optim.Adam(rival.parameters())
while not done():
    train(net, rival)
"""


def test_several_models_and_what_other_functions_make():
    converted = ElasticConverted(SCATTERED)
    lines = converted.text.splitlines()
    assert "net = DistributedDataParallel(net)  # averages the gradients while backward runs" in lines
    assert "rival = DistributedDataParallel(rival)  # averages the gradients while backward runs" in lines
    protect = "hora.elastic.protect([net, rival], [one, two])  # a death costs no step"
    assert lines[lines.index(protect) + 1] == "while not done():"
    assert lines[-1].startswith("dist.destroy_process_group()")
    notes = "\n".join(converted.notes)
    assert "line 6: loader is made in another function: give it to hora.elastic.protect" in notes
    assert "line 9: if this is the model in DistributedDataParallel, write net.module.state_dict" in notes


def test_an_epoch_that_is_no_range_is_noted():
    text = "import torch\nfrom torch.utils.data import DataLoader\nloader = DataLoader(rows, shuffle=True)\n"
    text += "optimizer = torch.optim.SGD(net.parameters())\nfor epoch in epochs:\n    for row in loader: pass\n"
    converted = ElasticConverted(text)
    assert "line 5: begin with loader.sampler.epoch" in "\n".join(converted.notes)
    assert "sampler=loader.sampler)" in converted.text


@pytest.mark.parametrize("parameters", ["net_parameters", "make().parameters()", "list(net.parameters())"])
def test_an_optimizer_of_an_unknown_model_is_rejected(parameters):
    with pytest.raises(ValueError, match=r"no line such as `optimizer = torch\.optim\.SGD"):
        ElasticConverted(f"import torch\noptimizer = torch.optim.SGD({parameters})\n")


def test_the_command(tmp_path, capsys):
    plain, elastic = tmp_path / "plain.py", tmp_path / "elastic.py"
    plain.write_text(SCRIPT)
    assert main(["init", "--from", str(plain), "--elastic", str(elastic)]) == 0
    assert elastic.read_text() == CONVERTED
    assert f"run it: hora run -np 2 --min-np 1 python {elastic}" in capsys.readouterr().out
