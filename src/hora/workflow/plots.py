"""Figures of a training run; matplotlib (the extra `examples`) is imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hora.workflow.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
_DOTTED = (0, (1, 1.5))
# Distinguishable with common kinds of colour blindness, and in grey.
COLOURS = ("#1b6ca8", "#e07a1f", "#3a9a5b", "#8e4585", "#b8a200", "#5f6b7a")


def polish(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Apply the house style: a left-aligned title, a light grid, no box."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x, color=QUIET)
    axes.set_ylabel(y, color=QUIET)
    axes.tick_params(colors=QUIET, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def draw_curves(
    axes: Axes, histories: Mapping[str, History], name: str, title: str, *, dotted: str = "on the training rows"
) -> None:
    """Plot a value over the epochs for several runs: validation solid, training dotted."""
    from matplotlib.ticker import MaxNLocator

    for place, ((label, history), colour) in enumerate(zip(histories.items(), COLOURS, strict=False)):
        epochs = history.column("epoch")
        axes.plot(epochs, history.column(f"train_{name}"), color=colour, linewidth=1.3, linestyle=_DOTTED)
        # Wide below, narrow on top: identical runs all stay visible.
        width = 2.0 + 3.0 * (len(histories) - 1 - place) / max(len(histories) - 1, 1)
        axes.plot(epochs, history.column(f"valid_{name}"), color=colour, linewidth=width, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot([], [], color=QUIET, linewidth=1.3, linestyle=_DOTTED, label=dotted)
    polish(axes, title, x="epoch")
    axes.legend(frameon=False, labelcolor=INK)


def plot_history(history: History | Mapping[str, History], *, title: str = "Training") -> Figure:
    """Plot loss, and the first metric if there is one, of one run or of several named runs."""
    import matplotlib.pyplot as plt

    histories = {"valid": history} if isinstance(history, History) else dict(history)
    first = next(iter(histories.values())).records[0]
    names = [key.removeprefix("valid_") for key in first if key.startswith("valid_")][:2]
    if not names:
        raise ValueError("the history has no validation values; pass a validation loader to fit()")
    figure, panels = plt.subplots(1, len(names), figsize=(5.2 * len(names), 3.8), squeeze=False, layout="constrained")
    for axes, name in zip(panels[0], names, strict=True):
        draw_curves(axes, histories, name, f"{title}: {name}")
    return figure


def plot_weights(
    model: torch.nn.Module, *, feature_names: tuple[str, ...] = (), class_names: tuple[str, ...] = ()
) -> Figure:
    """Plot every linear layer's weights and biases: blue is negative, red positive."""
    import matplotlib.pyplot as plt

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    if not layers:
        raise ValueError("the model has no linear layer to show")
    widths = [layer.in_features + 2 for layer in layers]
    figure, panels = plt.subplots(
        1, len(layers), figsize=(1.8 + 0.5 * sum(widths), 4.4), width_ratios=widths, squeeze=False, layout="constrained"
    )
    image: Any = None
    limit = max(float(layer.weight.detach().abs().max()) for layer in layers)
    for number, (axes, layer) in enumerate(zip(panels[0], layers, strict=True), start=1):
        gap = torch.full((layer.out_features, 1), float("nan"))
        bias = layer.bias.detach().reshape(-1, 1) if layer.bias is not None else gap
        table = torch.cat([layer.weight.detach(), gap, bias], dim=1)
        image = axes.imshow(table.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        polish(axes, f"layer {number}: {layer.in_features} → {layer.out_features}")
        axes.grid(visible=False)
        numbers = [str(i + 1) for i in range(layer.in_features)]
        inputs = list(feature_names) if number == 1 and feature_names else numbers
        axes.set_xticks([*range(layer.in_features), layer.in_features + 1], [*inputs, "bias"], rotation=90)
        outputs = list(class_names) if number == len(layers) and class_names else range(1, layer.out_features + 1)
        axes.set_yticks(range(layer.out_features), [str(name) for name in outputs])
    figure.colorbar(image, ax=panels[0, -1], shrink=0.8).outline.set_visible(False)
    return figure
