"""The command `hora init`: a commented training script to begin with, or your own script made distributed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hora.cli.convert import Converted
from hora.cli.convert_elastic import ElasticConverted
from hora.spelling import Parser
from hora.version import page

_START = '''"""A distributed training. Run it:

    {command}

Replace the data and the model; the comments say what the other lines are for. Guide: {guide}
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
{sampler_import}
import horovod.torch as hvd

EPOCHS = 5
BATCH_SIZE = 32
LEARNING_RATE = 0.05


def load_data():
    """Return a dataset with the same rows in the same order on every rank. Yours goes here."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def main():
    hvd.init()  # learns this process's place in the job; alone it is rank 0 of 1
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU for each process of a machine
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda")

    dataset = load_data()
{sampler}
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)).to(device)
    # All ranks together take a larger batch, so the learning rate grows with their number.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
{optimizer}
'''

_SAMPLER = """\
    # Each rank trains on its own share of the rows.
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"""

_ELASTIC_SAMPLER = """\
    # Each rank trains on its own share of the rows. When ranks come or go, the rows left in the epoch are shared anew.
    sampler = hvd.elastic.ElasticSampler(dataset)"""

_OPTIMIZER = """\
    # Averages the gradients of all ranks while backward runs.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"""

_SHARDED_OPTIMIZER = """\
    # Averages the gradients of all ranks. Each rank keeps the optimizer's state of its share of the parameters alone;
    # on one host the parameters too exist once, in shared memory.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), sharded=True)"""

_PLAIN = """\
    # All ranks begin with the weights and the optimizer's state of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order of rows in every epoch
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")  # over the ranks
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.3f} on {hvd.size()} ranks", flush=True)

"""

_ELASTIC = """\
    # What survivors keep and newcomers receive. A death costs the step in which it happens, and nothing else.
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, loss=0.0, per_step=True
    )

    def on_reset():  # the number of ranks has changed
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * hvd.size()

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state):
        while state.epoch < EPOCHS:
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                # Count the step right after it, before anything else that the ranks do together.
                sampler.record_batch(state.batch, BATCH_SIZE)  # these rows are done, whoever is lost
                state.batch += 1
                state.loss = loss.item()
                state.commit()  # copies nothing: here newcomers may join
            mean = hvd.allreduce(torch.tensor(state.loss), name="loss")  # over the ranks
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {mean.item():.3f} on {hvd.size()} ranks", flush=True)
            state.epoch, state.batch = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)  # another order of rows
            state.commit()

    train(state)

"""

_SAVE = """\
    weights = model.state_dict()
    if hvd.rank() == 0:  # one rank writes
        torch.save(weights, "model.pt")


if __name__ == "__main__":
    main()
"""


def training_script(name: str, *, elastic: bool = False, sharded: bool = False) -> str:
    """Return the text of a training script named `name`."""
    command = f"hora run -np 2 {'--min-np 1 ' if elastic else ''}python {name}"
    start = _START.format(
        command=command,
        guide=page("elastic.md" if elastic else "first_script.md"),
        sampler_import="" if elastic else "from torch.utils.data.distributed import DistributedSampler\n",
        sampler=_ELASTIC_SAMPLER if elastic else _SAMPLER,
        optimizer=_SHARDED_OPTIMIZER if sharded else _OPTIMIZER,
    )
    return start + (_ELASTIC if elastic else _PLAIN) + _SAVE


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = Parser(
        prog="hora init",
        description="Write a distributed training script: a commented one that runs as it is, or your own one "
        "with the lines that distribute it.",
    )
    parser.add_argument("file", type=Path, help="the file to write, for example train.py; it must not exist")
    about = "distribute this PyTorch script, which is written for one process"
    parser.add_argument("--from", dest="source", metavar="SCRIPT", type=Path, help=about)
    about = "write a script that continues when ranks die or join; with --from by DDP and hora.elastic.protect"
    parser.add_argument("--elastic", action="store_true", help=about)
    about = "write a script whose optimizer state is sharded over the ranks"
    parser.add_argument("--sharded", action="store_true", help=about)
    return parser


def main(argv: Sequence[str]) -> None:
    """Write a script to a file that does not exist yet."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    notes: list[str] = []
    if arguments.source is None:
        text = training_script(arguments.file.name, elastic=arguments.elastic, sharded=arguments.sharded)
    elif arguments.sharded:
        parser.error("--from writes a plain or an elastic script: leave --sharded out")
    else:
        try:
            kind = ElasticConverted if arguments.elastic else Converted
            converted = kind(arguments.source.read_text())
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"{arguments.source}: {getattr(error, 'strerror', None) or error}") from None
        text, notes = converted.text, converted.notes
    try:
        with arguments.file.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{arguments.file}: it exists and is not overwritten") from None
    command = f"hora run -np 2 {'--min-np 1 ' if arguments.elastic else ''}python {arguments.file}"
    print(f"wrote {arguments.file}; run it: {command}")
    for note in notes:
        print(f"  {arguments.source}, {note}")
