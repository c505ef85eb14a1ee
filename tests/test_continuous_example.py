"""user_dir/continuous_grid.py: the model finds the marked region."""

import importlib.util

import pytest
from commands import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def grid():
    file = ROOT / "user_dir" / "continuous_grid.py"
    spec = importlib.util.spec_from_file_location("continuous_grid", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_main_finds_the_marked_region(grid, monkeypatch, capsys):
    found = []

    def evaluate(attention, classifier):
        accuracy, distance = plain(attention, classifier)
        found.append((accuracy, distance.quantile(0.9).item()))
        return accuracy, distance

    plain = grid.evaluate
    monkeypatch.setattr(grid, "evaluate", evaluate)
    grid.main()
    assert len(found) == 2
    for (accuracy, distance), density, line in zip(
        found, ("softmax", "sparsemax"), capsys.readouterr().out.splitlines(), strict=True
    ):
        assert accuracy > 0.95 and distance < 0.05  # of a disk of radius 0.15
        assert line.startswith(f"continuous {density}: accuracy {accuracy:.2f}, ")
        assert f"within {distance:.3f} of" in line
    # The untrained model attends to the whole grid.
    attention = grid.GridAttention(1 + grid.CLASSES)
    accuracy, distance = plain(attention, grid.nn.Linear(1 + grid.CLASSES, grid.CLASSES))
    assert accuracy < 0.6 and distance.quantile(0.9) > 0.2
