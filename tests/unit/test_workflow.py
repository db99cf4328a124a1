"""`hora.workflow` in a world of one: the fit loop and its parts."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hora.workflow import (
    Checkpoints,
    EarlyStopping,
    History,
    MLflowLog,
    Recipe,
    Schedule,
    ShardSampler,
    TensorBoardLog,
    TensorLoader,
    accuracy,
    evaluate,
    fit,
    make_loaders,
    plot_history,
    plot_weights,
    seed_everything,
)
from hora.workflow.architectures import MLP
from hora.workflow.checkpoint import capture_rng, restore_rng
from hora.workflow.progress import Progress, describe

CROSS_ENTROPY = torch.nn.functional.cross_entropy


def _data(num_rows=60):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_rows, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class _Noisy(torch.nn.Module):
    """A network that draws random numbers of every kind in training and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        )

    def forward(self, inputs):
        if self.training:
            inputs = inputs + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.layers(inputs)


def _train(epochs=3, *, model=None, shuffle_by_torch=False, **options):
    seed_everything(1)
    model = model or _Noisy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = _data()
    loaders = make_loaders(data, data, batch_size=8)
    if shuffle_by_torch:
        loaders = (DataLoader(data, batch_size=8, shuffle=True), None)
    options.setdefault("progress", False)
    history = fit(model, loaders, optimizer, CROSS_ENTROPY, epochs=epochs, metrics={"accuracy": accuracy}, **options)
    return model, history


def _same(left, right):
    pairs = zip(left.state_dict().items(), right.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_fit_equals_a_handwritten_loop():
    data = _data()
    loader = DataLoader(data, batch_size=10)
    torch.manual_seed(0)
    ours, theirs = MLP([4, 8, 2]), MLP([4, 8, 2])
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            CROSS_ENTROPY(theirs(inputs), targets).backward()
            optimizer.step()
    sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    history = fit(ours, (loader, loader), sgd, CROSS_ENTROPY, epochs=2, metrics={"accuracy": accuracy}, progress=False)
    assert _same(ours, theirs)
    with torch.no_grad():
        outputs = theirs(data.tensors[0])
    assert history.last("valid_loss") == pytest.approx(float(CROSS_ENTROPY(outputs, data.tensors[1])))
    assert history.last("valid_accuracy") == pytest.approx(float(accuracy(outputs, data.tensors[1])))
    assert list(history.records[0]) == [
        "epoch", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "lr", "seconds",
    ]  # fmt: skip


def test_accumulated_batches_equal_one_large_batch():
    data = _data(24)  # 3 batches of 8: the second step has only one batch
    torch.manual_seed(0)
    ours, theirs = MLP([4, 2]), MLP([4, 2])
    theirs.load_state_dict(ours.state_dict())
    sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    fit(ours, (loader, None), sgd, CROSS_ENTROPY, epochs=1, recipe=Recipe(accumulate=2), progress=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for rows in (slice(0, 16), slice(16, 24)):
        optimizer.zero_grad()
        CROSS_ENTROPY(theirs(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        optimizer.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_clipping_limits_the_change():
    model = MLP([4, 2])
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(_data(8), batch_size=8)
    fit(model, (loader, None), sgd, CROSS_ENTROPY, epochs=1, recipe=Recipe(clip_norm=1e-3), progress=False)
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_runs_the_layers_in_it_and_learns(precision):
    seen = []
    model = MLP([4, 16, 2])
    model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    _, history = _train(15, model=model, recipe=Recipe(precision=precision))
    assert set(seen) == {getattr(torch, precision)}
    assert model.layers[0].weight.dtype is torch.float32
    assert history.last("valid_accuracy") > 0.8


@pytest.mark.parametrize("every_steps", [None, 3])
@pytest.mark.parametrize("shuffle_by_torch", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_killed_after_any_checkpoint_and_resumed_ends_with_the_same_weights(
    tmp_path, every_steps, shuffle_by_torch, precision
):
    class _KilledError(Exception):
        pass

    class _DyingFolder(Checkpoints):
        def save(self, state):
            super().save(state)
            if next(count) == limit:
                raise _KilledError

    recipe = Recipe(precision=precision, schedule=Schedule(decay="cosine"))
    options = {"recipe": recipe, "shuffle_by_torch": shuffle_by_torch}
    undisturbed, history = _train(3, **options)
    num_kills = 0
    for limit in range(0, 8, 2 if every_steps else 1):
        count = itertools.count()
        folder = tmp_path / str(limit)
        try:
            _train(3, checkpoints=_DyingFolder(folder, every_steps=every_steps), **options)
        except _KilledError:
            num_kills += 1
            random.seed(99)
            resumed, its_history = _train(3, checkpoints=Checkpoints(folder), **options)
            assert _same(undisturbed, resumed), f"killed after checkpoint {limit}"
            assert its_history.column("train_loss") == history.column("train_loss")
    assert num_kills >= 3


def test_a_finished_run_is_not_trained_again(tmp_path):
    first, history = _train(2, checkpoints=tmp_path)
    again, same = _train(2, checkpoints=tmp_path)
    assert _same(first, again)
    assert same.records == history.records
    longer, history = _train(3, checkpoints=tmp_path)
    assert len(history) == 3
    fresh, _ = _train(2, checkpoints=tmp_path, resume=False)
    assert _same(first, fresh)
    assert not _same(fresh, longer)


def _damage_cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def _damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _damage_empty(path):
    path.write_bytes(b"")


def _damage_foreign(path):
    path.with_suffix(".json").write_bytes(b'{"format": "something else", "num_bytes": 0, "sha256": ""}\n')


@pytest.mark.parametrize("damage", [_damage_cut, _damage_flip, _damage_empty, _damage_foreign])
def test_a_damaged_checkpoint_is_detected_and_its_predecessor_used(tmp_path, damage):
    undisturbed, _ = _train(3)
    _train(2, checkpoints=tmp_path)
    (tmp_path / ".partial.ckpt").write_bytes(b"half of a checkpoint")
    damage(Checkpoints(tmp_path).paths()[-1])
    with pytest.warns(UserWarning, match=r"00000002.ckpt is damaged .* trying the one before"):
        resumed, history = _train(3, checkpoints=tmp_path)
    assert _same(undisturbed, resumed)
    assert len(history) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"0000000{number}.{kind}" for number in (3, 4) for kind in ("ckpt", "json")
    ]


def test_a_checkpoint_runs_no_code(tmp_path):
    class _Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code in a checkpoint was run",))

    folder = Checkpoints(tmp_path)
    folder.save({"model": _Bomb()})
    payload = folder.read_last()
    with pytest.raises(ValueError, match=r"more than data: _pytest\.outcomes"):
        folder.decode(payload)


def test_early_stopping_stops_and_restores_the_best(tmp_path):
    model, history = _train(50, early_stopping=EarlyStopping("train_loss", patience=2, min_delta=0.05))
    assert len(history) < 50
    data = make_loaders(_data(), _data(), batch_size=8)
    best = history.best("train_loss")
    record = evaluate(model, data.valid, CROSS_ENTROPY, metrics={"accuracy": accuracy})
    assert record["valid_loss"] in history.column("valid_loss")
    assert record["valid_loss"] != history.last("valid_loss") or best["epoch"] == len(history)


def test_early_stopping_survives_a_resume(tmp_path):
    def stopping():
        return EarlyStopping("valid_accuracy", patience=2, highest=True, min_delta=0.02)

    undisturbed, history = _train(30, early_stopping=stopping())
    for epochs in (1, 3, 30, 30):  # the last call finds a stopped run
        resumed, its_history = _train(epochs, early_stopping=stopping(), checkpoints=tmp_path)
    assert len(its_history) == len(history) < 30
    assert _same(undisturbed, resumed)


def test_early_stopping_needs_an_existing_value():
    with pytest.raises(ValueError, match=r"watches 'valid_f1', but an epoch has epoch, train_loss"):
        _train(1, early_stopping=EarlyStopping("valid_f1"))


def test_schedule():
    warm = Schedule(warmup_epochs=4)
    assert [warm.factor(epoch, epochs=10, size=8) for epoch in (0, 2, 4, 9)] == [1.0, 4.5, 8.0, 8.0]
    steps = Schedule(scale=1, decay="steps", milestones=(3, 6))
    assert [steps.factor(epoch, epochs=9, size=8) for epoch in (0, 3, 7)] == pytest.approx([1, 0.1, 0.01])
    cosine = Schedule(decay="cosine", warmup_epochs=1)
    assert [cosine.factor(epoch, epochs=3, size=2) for epoch in (1, 2, 3)] == pytest.approx([2, 1, 0])
    _, history = _train(2, recipe=Recipe(schedule=Schedule(scale=3)))
    assert history.column("lr") == pytest.approx([0.03, 0.03])


def test_samplers_cover_all_rows(monkeypatch):
    from hora.workflow import peers

    monkeypatch.setattr(peers, "size", lambda: 4)
    seen, exact = [], []
    for rank in range(4):
        monkeypatch.setattr(peers, "rank", lambda rank=rank: rank)
        train, valid = ShardSampler(10), ShardSampler(10, shuffle=False)
        train.set_epoch(3)
        assert len(list(train)) == len(train) == 3
        assert len(list(valid)) == len(valid)
        seen += list(train)
        exact += list(valid)
    assert set(seen) == set(range(10))
    assert sorted(exact) == list(range(10))
    tiny = ShardSampler(1)
    assert list(tiny) == [0]


def test_a_sampler_divides_the_remaining_rows_among_another_number_of_ranks(monkeypatch):
    from hora.workflow import peers

    def rows(sampler, size):
        monkeypatch.setattr(peers, "size", lambda: size)
        found = []
        for rank in range(size):
            monkeypatch.setattr(peers, "rank", lambda rank=rank: rank)
            found.append(list(sampler))
        return found

    sampler = ShardSampler(10, seed=4)
    sampler.set_epoch(1)
    first = [its[:2] for its in rows(sampler, 3)]  # each rank has read two rows when one of them dies
    sampler.num_done = 6
    rest = rows(sampler, 2)
    assert sorted(row for its in [*first, *rest] for row in its) == list(range(10))
    sampler.num_done = 10
    assert rows(sampler, 2) == [[], []]
    loader = TensorLoader(torch.arange(10.0), torch.arange(10.0), batch_size=4)
    loader.sampler.num_done = 10
    assert list(loader) == []
    sampler.set_epoch(2)
    assert sampler.num_done == 0


def test_tensor_loader_applies_the_transform():
    inputs = torch.arange(10.0)
    loader = TensorLoader(inputs, inputs, batch_size=4, transform=lambda batch: -batch)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    assert all(torch.equal(batch, -target) for batch, target in batches)
    assert sorted(torch.cat([target for _, target in batches]).tolist()) == inputs.tolist()


def test_randomness_round_trip():
    state = capture_rng()
    first = (random.random(), np.random.rand(), torch.rand(1))
    restore_rng(state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == first


def test_history_is_saved_and_queried(tmp_path):
    history = History([{"epoch": 1, "loss": 3.0, "seconds": 1.0}, {"epoch": 2, "loss": 4.0, "seconds": 2.0}])
    history.save(tmp_path / "history.json")
    again = History.load(tmp_path / "history.json")
    assert list(again) == list(history)
    assert again.best("loss")["epoch"] == 1
    assert again.best("loss", highest=True)["epoch"] == 2
    assert again.seconds == 3.0


def test_tensorboard_files_hold_the_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, history = _train(2, loggers=[TensorBoardLog(tmp_path)])
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = [event.value for event in events.Scalars("valid/loss")]
    assert logged == pytest.approx(history.column("valid_loss"))


def test_mlflow_log_without_mlflow_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match="pip install mlflow"):
        _train(1, loggers=[MLflowLog()])


def test_tensorboard_log_without_tensorboard_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        _train(1, loggers=[TensorBoardLog(tmp_path)])


def test_a_log_shows_one_line_per_epoch(capsys):
    _train(2, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("epoch   2/2  train_loss 0.")


def test_a_terminal_shows_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(3, 4, visible=True)
    progress.start(1, 1)
    progress.step()
    progress.finish_epoch(1, {"train_loss": 0.5, "lr": 0.1, "seconds": 1.0})
    progress.close()
    shown = capsys.readouterr().err
    assert "epoch 2/3" in shown
    assert "6/12" in shown
    assert describe({"train_loss": 0.5, "lr": 0.1, "seconds": 1.0}) in shown


def test_figures(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    model, history = _train(2, model=MLP([4, 3, 2]))
    for figure in (
        plot_history(history),
        plot_history({"one": history, "two": history}),
        plot_weights(model, feature_names=("a", "b", "c", "d"), class_names=("x", "y")),
    ):
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="no linear layer"):
        plot_weights(torch.nn.ReLU())
    with pytest.raises(ValueError, match="no validation values"):
        plot_history(History([{"epoch": 1, "train_loss": 1.0}]))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Recipe(precision="int8"), "precision must be one of"),
        (lambda: Recipe(accumulate=0), "accumulate must be at least 1"),
        (lambda: Recipe(clip_norm=0.0), "clip_norm must be positive"),
        (lambda: Schedule(warmup_epochs=-1), "warmup_epochs must not be negative"),
        (lambda: Schedule(scale=0), "scale must be positive"),
        (lambda: Schedule(decay="linear"), "decay must be none, cosine or steps"),
        (lambda: Checkpoints("x", keep=0), "keep must be at least 1"),
        (lambda: Checkpoints("x", every_steps=0), "every_steps must be at least 1"),
        (lambda: EarlyStopping(patience=0), "patience must be at least 1"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta must not be negative"),
        (lambda: ShardSampler(0), "at least one row"),
        (lambda: TensorLoader(torch.ones(2), torch.ones(3), batch_size=1), "2 inputs but 3 targets"),
        (lambda: TensorLoader(torch.ones(2), torch.ones(2), batch_size=0), "batch_size must be at least 1"),
        (lambda: _train(0), "epochs must be at least 1"),
        (lambda: History([{"loss": 1.0}]).column("los"), "no column 'los' in the history; it has loss"),
        (lambda: History().last("loss"), "no epoch has been trained"),
        (lambda: History().best("loss"), "no epoch has been trained"),
        (lambda: evaluate(MLP([1, 1]), [], CROSS_ENTROPY), "has no batch on any rank"),
        (lambda: evaluate(MLP([1, 1]), [torch.ones(1)], CROSS_ENTROPY), "must yield .* but it yielded a Tensor"),
    ],
)
def test_invalid_arguments_are_explained(make, match):
    with pytest.raises(ValueError, match=match):
        make()
