"""Checks of a matplotlib figure that the analysis drew."""

import io

import numpy as np


def check_figure(entry):
    """Check titles, labels and data of every panel, and that the image is not blank."""
    figure = entry.figure
    assert entry.title and entry.caption and figure.get_suptitle(), entry.name
    panels = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    assert panels
    labelled = 0
    for axis in panels:
        behind = not axis.get_xlabel() and any(
            axis is not other and axis.get_shared_x_axes().joined(axis, other) for other in panels
        )
        if not behind:
            assert axis.get_xlabel() and axis.get_ylabel(), (entry.name, axis)
            has_own_label = entry.name.startswith(("output-layer", "trajectories-"))
            assert axis.get_title() or len(panels) == 1 or has_own_label, entry.name
        assert has_data(axis), entry.name
        labelled += len(axis.get_legend_handles_labels()[1])
    if labelled > 1:
        assert figure.legends or all(axis.get_legend() for axis in panels), entry.name
    for axis in set(figure.axes) - set(panels):
        assert axis.get_xlabel() or axis.get_ylabel(), entry.name  # a colour bar
    held = io.BytesIO()
    figure.set_layout_engine("none")  # takes half the time; tests of the commands use the layout
    figure.savefig(held, format="rgba", dpi=30)
    pixels = np.frombuffer(held.getvalue(), np.uint8).reshape(-1, 4)[:, :3]
    assert 0.01 < (pixels.min(1) < 200).mean() < 0.9, entry.name


def has_data(axis):
    """Return whether a panel has a finite line, a finite image or a bar."""
    if hasattr(axis, "get_zlim"):
        lines = [np.asarray(line.get_data_3d()) for line in axis.lines]
    else:
        lines = [np.asarray(line.get_xydata(), dtype=float) for line in axis.lines]
    return (
        any(np.isfinite(line).any() for line in lines)
        or any(np.isfinite(np.asarray(image.get_array())).any() for image in axis.images)
        or any(patch.get_height() > 0 for patch in axis.patches if hasattr(patch, "get_height"))
    )
