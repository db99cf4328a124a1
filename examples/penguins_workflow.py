"""The penguin lab with `hora.workflow`: the same training without writing the loop.

python examples/penguins_workflow.py
horovodrun -np 2 python examples/penguins_workflow.py
"""

import torch
from torch.utils.data import TensorDataset

import horovod.torch as hvd
from hora.labs.penguins.data import FEATURES, load_penguins
from hora.labs.penguins.training import features_of
from hora.workflow import EarlyStopping, accuracy, fit, load, make_loaders, save
from hora.workflow.architectures import MLP

NEW_PENGUIN = {
    "Island": "Dream",
    "CulmenLength": 51,
    "CulmenDepth": 19,
    "FlipperLength": 195,
    "BodyMass": 3700,
}


def main():
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    penguins = load_penguins()
    datasets = [
        TensorDataset(torch.tensor(rows.features), torch.tensor(rows.labels))
        for rows in (penguins.train, penguins.test)
    ]
    model = MLP([len(FEATURES), 10, 10, 3])
    history = fit(
        model,
        make_loaders(*datasets, batch_size=20),
        torch.optim.Adam(model.parameters(), lr=0.002 * hvd.size()),
        torch.nn.functional.cross_entropy,
        epochs=50,
        metrics={"accuracy": accuracy},
        early_stopping=EarlyStopping("valid_loss", patience=10),
    )
    if hvd.rank() == 0:
        save("out/penguins_workflow", model, classes=penguins.species, features=features_of(penguins))
        best = history.best("valid_loss")
        print(f"best epoch {best['epoch']:.0f}: {best['valid_accuracy']:.1%} of the test birds")
        print("a new penguin:", load("out/penguins_workflow").predict(NEW_PENGUIN))


if __name__ == "__main__":
    main()
