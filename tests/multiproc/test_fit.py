"""`hora.workflow.fit` on several ranks: one model, exact metrics, files only by rank 0, bit-identical resume."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import warnings
from unittest import mock

import pytest
import torch
from hvd_session import assert_same_everywhere
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from hora.workflow import (
    Checkpoints,
    EarlyStopping,
    Recipe,
    Schedule,
    TensorBoardLog,
    accuracy,
    evaluate,
    fit,
    make_loaders,
    peers,
    seed_everything,
)

pytestmark = pytest.mark.ranks(2, 3)
CROSS_ENTROPY = torch.nn.functional.cross_entropy


@contextlib.contextmanager
def _world():
    hvd.init()
    try:
        yield
        hvd.barrier()
    finally:
        hvd.shutdown()


def _data(num_rows=52):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_rows, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class _Noisy(torch.nn.Module):
    """Draws random numbers while training and keeps running statistics; both differ between ranks."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        )

    def forward(self, inputs):
        return self.layers(inputs + 0.01 * random.random() if self.training else inputs)


def _train(epochs=3, *, optimizer=None, **options):
    seed_everything(10 + hvd.rank())  # different weights and random numbers on every rank
    model = _Noisy()
    adam = (optimizer or torch.optim.Adam)(model.parameters(), lr=0.01)
    loaders = make_loaders(_data(), _data(), batch_size=8)
    options.setdefault("progress", False)
    history = fit(model, loaders, adam, CROSS_ENTROPY, epochs=epochs, metrics={"accuracy": accuracy}, **options)
    return model, history


def _tensors(model):
    return list(model.state_dict().values())


def test_all_ranks_end_with_one_model_and_exact_metrics():
    with _world():
        model, history = _train()
        assert_same_everywhere(_tensors(model))
        inputs, labels = _data().tensors
        with torch.no_grad():
            outputs = model.eval()(inputs)
        assert history.last("valid_loss") == pytest.approx(float(CROSS_ENTROPY(outputs, labels)), rel=1e-5)
        assert history.last("valid_accuracy") == pytest.approx(float(accuracy(outputs, labels)))


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(clip_norm=0.1), Recipe(accumulate=2)])
def test_ranks_together_equal_one_process_with_the_whole_batch(recipe):
    """The ranks' batches together are the batch of one process, so the weights agree."""
    with _world():
        num, width = 6 * hvd.size(), 4
        inputs = torch.randn(num, width, generator=torch.Generator().manual_seed(1))
        labels = (inputs.sum(1) > 0).long()
        torch.manual_seed(0)
        ours, theirs = torch.nn.Linear(width, 2), torch.nn.Linear(width, 2)
        theirs.load_state_dict(ours.state_dict())
        mine = TensorDataset(inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()])
        loader = DataLoader(mine, batch_size=3, sampler=list(range(6)))
        sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
        fit(ours, (loader, None), sgd, CROSS_ENTROPY, epochs=2, recipe=recipe, progress=False)
        alone = torch.optim.SGD(theirs.parameters(), lr=0.1)
        batch = 3 * hvd.size() * recipe.accumulate
        for _ in range(2):
            for rows in torch.arange(num).split(batch):
                alone.zero_grad()
                CROSS_ENTROPY(theirs(inputs[rows]), labels[rows]).backward()
                if recipe.clip_norm:
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), recipe.clip_norm)
                alone.step()
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every_steps", [None, 2])
def test_interrupted_after_any_checkpoint_and_resumed_ends_with_the_same_weights(tmp_path, every_steps):
    class _InterruptedError(Exception):
        pass

    class _Stops(EarlyStopping):
        """Raises on every rank after an epoch, as if the job were killed there."""

        def should_stop(self, record, model):
            if record["epoch"] == last:
                raise _InterruptedError
            return False

    recipe = Recipe(schedule=Schedule(warmup_epochs=1, decay="cosine"), precision="bfloat16")
    with _world():
        undisturbed, history = _train(4, recipe=recipe)
        for last in (2, 3):
            folder = tmp_path / str(last)
            with pytest.raises(_InterruptedError):
                _train(
                    4,
                    recipe=recipe,
                    checkpoints=Checkpoints(folder, every_steps=every_steps),
                    early_stopping=_Stops("train_loss", restore_best=False),
                )
            resumed, its_history = _train(4, recipe=recipe, checkpoints=folder)
            for left, right in zip(_tensors(undisturbed), _tensors(resumed), strict=True):
                assert torch.equal(left, right)
            assert its_history.column("valid_loss") == history.column("valid_loss")


def test_only_rank_0_writes_and_prints(tmp_path):
    with _world():
        mine = tmp_path / f"rank{hvd.rank()}"  # a folder per rank shows which rank writes
        read, write = os.pipe()
        saved = os.dup(1)
        os.dup2(write, 1)
        try:
            _train(2, progress=True, checkpoints=mine / "checkpoints", loggers=[TensorBoardLog(mine / "tb")])
        finally:
            os.dup2(saved, 1)
            os.close(write)
            os.close(saved)
        with os.fdopen(read) as pipe:
            printed = pipe.read()
        assert mine.exists() == (hvd.rank() == 0)
        assert ("epoch   2/2" in printed) == (hvd.rank() == 0)


def test_resuming_with_a_checkpoint_only_rank_0_can_see(tmp_path):
    with _world():
        undisturbed, _ = _train(3)
        mine = tmp_path / f"rank{hvd.rank()}"
        _train(1, checkpoints=mine)
        resumed, history = _train(3, checkpoints=mine)
        assert len(history) == 3
        for left, right in zip(_tensors(undisturbed), _tensors(resumed), strict=True):
            assert torch.equal(left, right)


def test_the_users_distributed_optimizer_is_used_unchanged():
    def fp16(parameters, lr):
        return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), compression=hvd.Compression.fp16)

    with _world():
        model, _ = _train(2, optimizer=fp16)
        assert_same_everywhere(_tensors(model))
        with pytest.raises(ValueError, match=r"backward_passes_per_step=1, but the recipe says accumulate=3"):
            _train(1, optimizer=fp16, recipe=Recipe(accumulate=3))


def test_a_second_fit_continues_with_the_same_optimizer():
    with _world():
        model = torch.nn.Linear(4, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = make_loaders(_data(), _data(), batch_size=8)
        first = fit(model, loaders, sgd, CROSS_ENTROPY, epochs=2, progress=False)
        second = fit(model, loaders, sgd, CROSS_ENTROPY, epochs=2, progress=False)
        assert second.last("valid_loss") < first.last("valid_loss")
        assert_same_everywhere(_tensors(model))


def test_all_ranks_stop_together():
    with _world():
        _, history = _train(40, early_stopping=EarlyStopping("train_loss", patience=1, min_delta=0.05))
        assert hvd.allgather_object(len(history)) == [len(history)] * hvd.size()
        assert len(history) < 40


def test_warm_up_reaches_the_size_of_the_world():
    with _world():
        _, history = _train(3, recipe=Recipe(schedule=Schedule(warmup_epochs=1)))
        assert history.column("lr")[0] < history.column("lr")[1]
        assert history.last("lr") == pytest.approx(0.01 * hvd.size())


def test_validation_with_fewer_rows_than_ranks():
    with _world():
        loaders = make_loaders(_data(8), _data(1), batch_size=4)
        record = evaluate(torch.nn.Linear(4, 2), loaders.valid, CROSS_ENTROPY)
        assert hvd.allgather_object(record) == [record] * hvd.size()


def test_an_elastic_job_without_events_trains_identically():
    def train(epochs=3, **more):
        return _train(epochs, early_stopping=EarlyStopping(patience=9), recipe=Recipe(accumulate=2), **more)

    with _world(), tempfile.TemporaryDirectory() as folder:
        model, history = train()
        unshared = DataLoader(_data(), batch_size=8, shuffle=True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(peers, "is_elastic", return_value=True):
            again, same = train(checkpoints=folder)
            _, longer = train(epochs=4, checkpoints=folder)
            with pytest.raises(ValueError, match=r"loader whose sampler is RandomSampler; use .*make_loaders"):
                fit(model, (unshared, None), sgd, CROSS_ENTROPY, epochs=1, progress=False)
        assert all(torch.equal(mine, its) for mine, its in zip(_tensors(again), _tensors(model), strict=True))
        for name in ("train_loss", "valid_accuracy", "epoch"):
            assert same.column(name) == history.column(name)
        assert longer.column("epoch") == [1.0, 2.0, 3.0, 4.0], "it goes on from rank 0's checkpoint"
        assert longer.column("train_loss")[:3] == history.column("train_loss")


def test_a_loader_that_does_not_shard_causes_a_warning():
    with _world():
        loader = DataLoader(_data(), batch_size=8, shuffle=True)
        model = torch.nn.Linear(4, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match=r"ranks trains on all rows: .* RandomSampler; use .*make_loaders"):
            fit(model, (loader, None), sgd, CROSS_ENTROPY, epochs=1, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _train(1)
