"""The densities of continuous attention, without a trained model."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

from multimax_fairseq.analysis import figures
from multimax_fairseq.analysis.canvas import legend_below, style
from multimax_fairseq.analysis.figures.catalogue import Drawn
from multimax_fairseq.continuous.densities import LAPLACE, TRIANGULAR, TRUNCATED_PARABOLA
from multimax_fairseq.continuous.expectation import gaussian_basis

TITLE = "Densities of continuous attention"
REACH, POINTS = 3.0, 301


def families() -> Drawn:
    """Densities that softmax (alpha = 1) and sparsemax (alpha = 2) make of the same scores, with
    mean 0 and scale 1 (Fig. 1 of Martins et al. 2020). Left: over time, from the scores -t^2 / 2
    (top) and -|t| (bottom). Middle and right: over a plane, from the scores -|t|^2 / 2."""
    time = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    zero, one = torch.zeros_like(time[:1]), torch.ones_like(time[:1])
    gaussian = gaussian_basis(time, zero, one)[:, 0]
    lines = (
        {"Gaussian": gaussian, "truncated parabola": TRUNCATED_PARABOLA(time, zero, one)},
        {"Laplace": LAPLACE(time, zero, one), "triangular": TRIANGULAR(time, zero, one)},
    )
    level = math.sqrt(1 / math.pi)  # -lambda of Eq. 11 for two dimensions and the covariance I
    square = time[:, None] ** 2 + time**2
    planes = {
        "Gaussian": gaussian[:, None] * gaussian,
        "truncated paraboloid": (level - square / 2).clamp(min=0),
    }
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    axes = figure.subplot_mosaic([["0", "2", "3"], ["1", "2", "3"]])
    for number, curves in enumerate(lines):
        axis = axes[str(number)]
        for index, (name, density) in enumerate(curves.items(), 2 * number):
            axis.plot(time.numpy(), density.numpy(), label=name, **{**style(index), "marker": ""})
        axis.set(xlabel="t", ylabel="density", ylim=(0, 1.05))
        axis.set_title(f"scores {('$-t^2/2$', '$-|t|$')[number]}", fontsize=10)
    for number, (name, density) in enumerate(planes.items(), 2):
        axis = axes[str(number)]
        extent = (-REACH, REACH, -REACH, REACH)
        image = axis.imshow(density.numpy(), cmap="cividis", extent=extent, origin="lower")
        axis.set(xlabel="$t_1$", ylabel="$t_2$")
        axis.set_title(name, fontsize=10)
        figure.colorbar(image, ax=axis, label="density", shrink=0.7)
    legend_below(figure)
    figure.suptitle(TITLE, fontsize=12, fontweight="bold")
    return Drawn("densities", TITLE, " ".join((families.__doc__ or "").split()), figure)


def plot(out: Path) -> Iterator[str]:
    """Write the figure and yield its name."""
    drawn = families()
    figures.write(drawn, out)
    yield drawn.name
