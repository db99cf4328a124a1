"""The penguins lab's figure: loss and accuracy of all runs, their times, and the network's decision regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hora.labs.penguins.data import DIVISORS, FEATURES, Penguins
from hora.labs.penguins.training import PenguinRun
from hora.workflow import ModelFile
from hora.workflow.plots import COLOURS, INK, draw_curves, polish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_X, _Y = FEATURES.index("CulmenLength"), FEATURES.index("FlipperLength")
# The hues of the palmerpenguins artwork, safe for colour-blind readers.
_SPECIES = {"Adelie": "#e8871e", "Gentoo": "#1b7f79", "Chinstrap": "#9b4f96"}


def draw(runs: Mapping[str, PenguinRun], data: Penguins, model: ModelFile, observation: Mapping[str, Any]) -> Figure:
    """Draw all four panels."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    figure, panels = plt.subplots(2, 2, figsize=(12.5, 8.6))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15, wspace=0.04, hspace=0.05)
    histories = {name: run.history for name, run in runs.items()}
    draw_curves(panels[0, 0], histories, "loss", "Cross-entropy loss")
    panels[0, 0].set_yscale("log")
    panels[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0, 0].yaxis.set_major_formatter("{x:g}")
    panels[0, 0].yaxis.set_minor_locator(NullLocator())
    draw_curves(panels[0, 1], histories, "accuracy", "Accuracy")
    panels[0, 1].yaxis.set_major_formatter("{x:.0%}")
    _times(panels[1, 0], runs)
    _map(panels[1, 1], data, model, observation)
    return figure


def _times(axes: Axes, runs: Mapping[str, PenguinRun]) -> None:
    names, seconds = list(runs), [run.history.seconds for run in runs.values()]
    bars = axes.barh(names, seconds, color=COLOURS[: len(names)], height=0.55)
    labels = [
        f" {time:.1f} s\n {run.accuracy:.1%} of the test birds"
        for time, run in zip(seconds, runs.values(), strict=True)
    ]
    axes.bar_label(bars, labels, color=INK, fontsize=11)
    polish(axes, "Training time (without start-up) and test accuracy", x="seconds")
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.55)
    axes.tick_params(axis="y", labelsize=11, labelcolor=INK)


def _map(axes: Axes, data: Penguins, model: ModelFile, observation: Mapping[str, Any]) -> None:
    """Plot culmen against flipper length: every bird, the network's regions, and the new penguin."""
    features = np.concatenate([data.train.features, data.test.features])
    labels = np.concatenate([data.train.labels, data.test.labels])
    scale = DIVISORS["FlipperLength"]
    colours = [_SPECIES.get(name, COLOURS[i]) for i, name in enumerate(data.species)]
    x, y, regions = _regions(features, model)
    levels = np.arange(len(colours) + 1) - 0.5
    axes.contourf(x, y * scale, regions, levels=levels, colors=colours, alpha=0.15)
    for index, name in enumerate(data.species):
        birds = features[labels == index]
        axes.scatter(
            birds[:, _X], birds[:, _Y] * scale, s=28, color=colours[index], edgecolor="white", lw=0.5, label=name
        )
    star = float(observation["CulmenLength"]), float(observation["FlipperLength"])
    axes.scatter(*star, marker="*", s=480, color="white", edgecolor=INK, linewidth=1.6, zorder=5)
    axes.annotate(
        f"new penguin:\n{model.predict(observation)}", star, xytext=(0.98, 0.74), textcoords="axes fraction",
        ha="right", color=INK, fontsize=11, fontweight="bold", arrowprops={"arrowstyle": "-", "color": INK},
    )  # fmt: skip
    polish(axes, "Where the network draws its lines", x="culmen length (mm)", y="flipper length (mm)")
    axes.grid(visible=False)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)


def _regions(features: np.ndarray, model: ModelFile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the predicted species over a grid. Features that are not shown are averaged over the 15 nearest birds."""
    birds = np.unique(features, axis=0)
    low, high = birds[:, [_X, _Y]].min(axis=0), birds[:, [_X, _Y]].max(axis=0)
    margin = 0.05 * (high - low)
    x, y = (np.linspace(a, b, 160, dtype=np.float32) for a, b in zip(low - margin, high + margin, strict=True))
    points = np.stack([axis.ravel() for axis in np.meshgrid(x, y)], axis=1)
    spread = birds[:, [_X, _Y]].std(axis=0)
    gaps = (points[:, None] - birds[None, :, [_X, _Y]]) / spread
    nearest = np.argsort((gaps**2).sum(axis=2), axis=1)[:, :15]
    grid = birds[nearest].mean(axis=1)
    grid[:, [_X, _Y]] = points
    with torch.no_grad():
        regions = model.model(torch.from_numpy(grid.astype(np.float32))).argmax(dim=1)
    return x, y, regions.reshape(len(y), len(x)).numpy()
