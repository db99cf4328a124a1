"""`hora demo images`: trains the image classifier on several local ranks and draws the result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs.images.options import ImageOptions
from hora.spelling import Parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hora.labs.images.training import ImageRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser()
    given = parser.parse_args(argv)
    if given.np < 1:
        parser.error(f"-np must be at least 1, but it is {given.np}")
    given.log_dir = str(Path(given.log_dir).resolve())
    try:
        options = ImageOptions.from_namespace(given)
    except ValueError as error:
        parser.error(str(error))
    from hora.labs.images.training import measure, train
    from sparkdl import HorovodRunner

    runner = HorovodRunner(np=-given.np, driver_log_verbosity="all", dashboard=given.dashboard or None)
    if options.synthetic:
        runner.run(measure, options=options)
        return 0
    trained: ImageRun = runner.run(train, options=options)
    folder = Path(options.log_dir)
    print(f"\ntest accuracy {trained.accuracy:.2%} on {trained.num_ranks} ranks in {trained.seconds:.0f} s")
    _draw(options, trained).savefig(folder / "images.png", dpi=150)
    for what, name in (("figure", "images.png"), ("model", "model"), ("logs", "tensorboard")):
        print(f"{what:<8} {folder / name}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = Parser(
        prog="hora demo images",
        description="Train an image classifier on several local ranks, and draw what it learned.",
    )
    parser.add_argument("-np", "--np", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument("--dashboard", action="store_true", help="serve a live page of the job, and print its address")
    ImageOptions.add_flags(parser)
    return parser


def _draw(options: ImageOptions, trained: ImageRun) -> Figure:
    """Draw the curves and the sixteen test images with the least confident predictions."""
    import matplotlib

    matplotlib.use("Agg")  # files only: a server has no screen
    import matplotlib.pyplot as plt

    from hora.labs.images.data import Augmentation, cifar10, digits
    from hora.workflow import load
    from hora.workflow.plots import COLOURS, INK, draw_curves

    data = digits() if options.data == "digits" else cifar10(options.data_dir)
    normalise = Augmentation(*data.moments())
    predictions = load(trained.model_path).predict_tensor(normalise(data.test_images[:1000]))
    doubt = sorted(range(len(predictions)), key=lambda i: max(predictions[i].probabilities.values()))[:16]
    figure = plt.figure(figsize=(12.5, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1), squeeze=False)[0]
    axes = left.subplots()
    histories = {f"{trained.num_ranks} ranks, test images": trained.history}
    title = f"ResNet-{options.depth} on {options.data}: {trained.accuracy:.1%}"
    draw_curves(axes, histories, "accuracy", title, dotted="training images, augmented")
    axes.yaxis.set_major_formatter("{x:.0%}")
    right.suptitle("The sixteen it doubts most", fontweight="bold", color=INK)
    for panel, index in zip(right.subplots(4, 4).flat, doubt, strict=False):
        image = data.test_images[index].permute(1, 2, 0)
        panel.imshow(image.squeeze(-1) if data.channels == 1 else image, cmap="gray_r")
        panel.set_axis_off()
        predicted, truth = predictions[index].label, data.classes[int(data.test_labels[index])]
        colour = INK if predicted == truth else COLOURS[1]
        panel.set_title(predicted if predicted == truth else f"{predicted}, not {truth}", fontsize=9, color=colour)
    return figure
