"""`hora demo penguins`: from raw data to a prediction, alone and distributed, with a figure, a model and a report."""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hora.spelling import Parser

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from hora.labs.penguins.data import Penguins
    from hora.labs.penguins.training import PenguinRun
    from hora.workflow import ModelFile

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2430; max-width: 62rem; margin: 2.5rem auto;
  padding: 0 1rem }
h1 { font-size: 1.9rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; display: block;
  overflow-x: auto }
th, td { text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid #e5e7eb }
th { color: #6b7280; font-weight: 600 } img { max-width: 100% }
pre { background: #f6f7f9; padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem }
"""
NEW_PENGUIN = {"Island": "Biscoe", "CulmenLength": 50.4, "CulmenDepth": 15.3, "FlipperLength": 224, "BodyMass": 5550}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.np < 1 or options.epochs < 1:
        parser.error(f"-np and --epochs must be at least 1, but they are {options.np} and {options.epochs}")
    began = time.perf_counter()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with _spark(options.np, wanted=not options.no_spark) as spark:
        data = _prepare(options.csv, spark)
        runs = _train(data, spark, options.np, options.epochs, folder, options.framework, options.dashboard)
    _show(data, runs, folder)
    print(f"\nThe lab took {time.perf_counter() - began:.0f} s.")
    hora = "hora" if shutil.which("hora") else sys.argv[0]  # `make demo` has its own, which is not on the PATH
    print(f"\nTo see a training live, in the browser, and to kill its ranks: {hora} demo faults")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = Parser(
        prog="hora demo penguins",
        description="Go from raw data to a prediction, alone and distributed, with a figure, a model and a report.",
    )
    parser.add_argument("--csv", help="a file with your own penguins (default: the palmerpenguins package)")
    parser.add_argument("--out", default="out/penguins", help="folder for the results (default: out/penguins)")
    parser.add_argument(
        "-np", "--np", type=int, default=2, metavar="N", help="number of ranks of the distributed run (default: 2)"
    )
    parser.add_argument("--dashboard", action="store_true", help="serve a live page of the distributed run")
    parser.add_argument("--epochs", type=int, default=50, help="number of epochs (default: 50)")
    parser.add_argument(
        "--no-spark", action="store_true", help="prepare the data with pandas, train on local processes"
    )
    parser.add_argument(
        "--framework", choices=("torch", "keras"), default="torch", help="framework that trains (default: torch)"
    )
    return parser


@contextmanager
def _spark(num_slots: int, *, wanted: bool) -> Iterator[SparkSession | None]:
    """Yield a local Spark session with a slot per rank; None if Spark or Java is missing."""
    reason = "" if wanted else "not used"
    if wanted and shutil.which("java") is None:
        reason = "no Java here, so pandas prepares the data"
    elif wanted and importlib.util.find_spec("pyspark") is None:
        reason = "pyspark is not installed, so pandas prepares the data"
    if reason:
        print(f"Spark: {reason}", flush=True)
        yield None
        return
    from pyspark.sql import SparkSession

    print("Spark: starting a local session …", flush=True)
    builder = SparkSession.builder.master(f"local[{num_slots}]").appName("hora demo penguins")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(num_slots),
        # a few hundred rows: optimizing queries would take longer than running them
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.sparkContext.pythonExec = sys.executable  # not the first python3 in the PATH
    try:
        yield session
    finally:
        session.stop()


def _prepare(csv: str | None, spark: SparkSession | None) -> Penguins:
    import numpy as np

    from hora.labs.penguins.data import load_penguins

    _step("1. Prepare the data")
    data = load_penguins(csv, spark=spark)
    print(f"{data.prepared_by}: {data.num_train_birds} birds to learn from, {len(data.test)} to be tested on")
    print(f"training rows: {len(data.train)}, every bird several times (oversampling)")
    print(f"species {', '.join(data.species)}; islands {', '.join(data.islands)}")
    if spark is not None:
        other = load_penguins(csv)
        same = all(
            np.array_equal(left.features, right.features) and np.array_equal(left.labels, right.labels)
            for left, right in ((data.train, other.train), (data.test, other.test))
        )
        print(f"pandas, as a check: {'the same rows in the same order' if same else 'OTHER ROWS'}")
    return data


def _train(
    data: Penguins, spark: SparkSession | None, np: int, epochs: int, folder: Path, framework: str, dashboard: bool
) -> dict[str, PenguinRun]:
    import torch

    import hora.torch as hvd
    from hora.labs.penguins.training import train
    from sparkdl import HorovodRunner

    model_path = str((folder / "model").resolve())
    _step("2. Train alone")
    alone = train(data, epochs=epochs, framework=framework)
    _step("3. The same function under HorovodRunner(np=-1)")
    single = HorovodRunner(np=-1).run(train, data=data, epochs=epochs, framework=framework)
    hvd.shutdown()
    same = all(torch.equal(tensor, single.weights[name]) for name, tensor in alone.weights.items())
    print(f"weights after {epochs} epochs: {'identical to those of step 2' if same else 'OTHER THAN IN STEP 2'}")
    num = np if spark is not None else -np
    _step(f"4. Distributed: HorovodRunner(np={num}), {'Spark tasks' if spark is not None else 'processes'}")
    runner = HorovodRunner(np=num, driver_log_verbosity="all", dashboard=dashboard or None)
    together = runner.run(train, data=data, epochs=epochs, framework=framework, model_path=model_path)
    return {"one process": alone, "HorovodRunner, 1 rank": single, f"HorovodRunner, {np} ranks": together}


def _show(data: Penguins, runs: Mapping[str, PenguinRun], folder: Path) -> None:
    import matplotlib

    from hora.labs.penguins.data import FEATURES
    from hora.labs.penguins.figure import draw
    from hora.workflow import load, plot_weights

    _step("5. Look at it")
    matplotlib.use("Agg")  # files only: a server has no screen
    model = load(folder / "model")
    rows = [(name, f"{run.history.seconds:.1f} s", f"{run.accuracy:.1%}") for name, run in runs.items()]
    for name, seconds, accuracy in rows:
        print(f"{name:<24} {seconds:>8}   {accuracy} of the test birds")
    print(_weights_text(model))
    draw(runs, data, model, NEW_PENGUIN).savefig(folder / "penguins.png", dpi=160)
    weights = plot_weights(model.model, feature_names=FEATURES, class_names=model.classes)
    weights.savefig(folder / "weights.png", dpi=130)
    _step("6. A new penguin")
    prediction = model.predict(NEW_PENGUIN)
    print(", ".join(f"{name} {value}" for name, value in NEW_PENGUIN.items()))
    print(f"prediction: {prediction}")
    _write_report(data, rows, model, folder)
    files = {"figure": "penguins.png", "weights": "weights.png", "model": "model", "report": "report.html"}
    for what, file in files.items():
        print(f"{what:<8} {(folder / file).resolve()}")


def _weights_text(model: ModelFile) -> str:
    lines = []
    for name, tensor in model.model.state_dict().items():
        values = ", ".join(f"{value:.2f}" for value in tensor.flatten()[:8].tolist())
        lines.append(f"{name:<16} {tuple(tensor.shape)!s:<9} {values}{', …' if tensor.numel() > 8 else ''}")
    return "\n".join(lines)


def _write_report(data: Penguins, rows: list[tuple[str, str, str]], model: ModelFile, folder: Path) -> None:
    probabilities = model.predict(NEW_PENGUIN).probabilities
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Which penguin is it?</title>
<style>{_STYLE}</style>
<h1>Which penguin is it?</h1>
<p>{data.num_train_birds} birds to learn from, {len(data.test)} to be tested on. Every training bird is repeated \
(oversampling), so an epoch has {len(data.train)} rows.</p>
<p>Prepared by {html.escape(data.prepared_by)}: incomplete rows dropped, island indexed, flipper / 10, mass / 100, \
split 70/30.</p>
{_table(("run", "training time", "test accuracy"), rows)}
{_picture(folder / "penguins.png", "loss, accuracy, time and decision regions of all runs")}
<h2>Weights and biases</h2>
{_picture(folder / "weights.png", "the weights of every layer")}
<pre>{html.escape(_weights_text(model))}</pre>
<h2>A new penguin</h2>
{_table(("measurement", "value"), list(NEW_PENGUIN.items()))}
{_table(("species", "probability"), [(name, f"{value:.2%}") for name, value in probabilities.items()])}
<h2>What to do next</h2>
<p>Load the model, ask it about a bird of your own, or train on a table of your own:</p>
<pre>from hora.workflow import load

bird = {html.escape(str(NEW_PENGUIN))}
load({html.escape(repr(str((folder / "model").resolve())))}).predict(bird)

hora demo penguins --csv my_penguins.csv     # the same lab on your own rows
hora demo faults                             # kill ranks of a training on its live page
hora init train.py                           # a script to begin with: hora run -np 2 python train.py</pre>
</html>"""
    (folder / "report.html").write_text(page, encoding="utf-8")


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) for tag, row in lines)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _picture(path: Path, description: str) -> str:
    """Return a PNG as part of the page."""
    return f'<img alt="{description}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def _step(title: str) -> None:
    print(f"\n{title}", flush=True)
