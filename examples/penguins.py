"""The penguin lab with the training loop written out: nothing between you and Horovod.

    python examples/penguins.py                             # alone
    horovodrun -np 2 python examples/penguins.py            # two processes of this machine
    python examples/penguins.py --np -2                     # the same through HorovodRunner
    python examples/penguins.py --np 2                      # two tasks of the active (or a local) Spark

The eight steps that make a training script distributed are marked 1 to 8.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd  # 1. import Horovod


class PenguinNet(torch.nn.Module):
    """A network with five measurements as inputs and three species as outputs."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(5, 10)
        self.fc2 = torch.nn.Linear(10, 10)
        self.fc3 = torch.nn.Linear(10, 3)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.fc3(x)


def train_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def test_epoch(model, loader, device):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def train(epochs=50, batch_size=20, learning_rate=0.002, checkpoint=None):
    """Train on this rank; return the accuracy on the test rows, on every rank."""
    from hora.labs.penguins.data import load_penguins

    hvd.init()  # 2. initialize Horovod
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())  # 3. one GPU per process
        device = torch.device("cuda")

    penguins = load_penguins()
    train_set = TensorDataset(torch.tensor(penguins.train.features), torch.tensor(penguins.train.labels))
    test_set = TensorDataset(torch.tensor(penguins.test.features), torch.tensor(penguins.test.labels))
    # 4. every rank trains on its own share of the rows
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=0)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=batch_size)

    model = PenguinNet().to(device)
    # 5. the total batch grows with the number of ranks, and so does the learning rate
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * hvd.size())
    # 6. average the gradients of all ranks
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # 7. all ranks start from rank 0's weights
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, device)
        test_loss, accuracy = test_epoch(model, test_loader, device)
        if hvd.rank() == 0 and epoch % 10 == 0:
            print(
                f"epoch {epoch:>3}  loss {loss:.4f}  test loss {test_loss:.4f}  test accuracy {accuracy:.1%}",
                flush=True,
            )

    if checkpoint is not None and hvd.rank() == 0:  # 8. only rank 0 writes
        torch.save({"model": model.state_dict(), "epoch": epochs}, checkpoint)
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, help="run through HorovodRunner: -2 two local processes, 2 two Spark tasks")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--checkpoint", help="where rank 0 saves the model")
    args = parser.parse_args()
    options = {"epochs": args.epochs, "checkpoint": args.checkpoint and os.path.abspath(args.checkpoint)}
    if args.np is None:
        accuracy = train(**options)
        is_first = hvd.rank() == 0
    else:
        from sparkdl import HorovodRunner

        accuracy = HorovodRunner(np=args.np, driver_log_verbosity="all").run(train, **options)
        is_first = True
    if is_first:
        print(f"test accuracy: {accuracy:.1%}")


if __name__ == "__main__":
    main()
