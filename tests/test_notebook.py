"""docs/multimax.ipynb runs as it stands and prints what it shows."""

import json
import re

import pytest
from commands import ROOT, run

pytestmark = pytest.mark.long


def test_notebook_prints_its_stored_output(tmp_path):
    cells = json.loads((ROOT / "docs" / "multimax.ipynb").read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    shown = "".join(
        "".join(output["text"])
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "stream"
    )
    printed = run(tmp_path, "python", "-c", code, MPLBACKEND="agg")
    number = r"\d+\.\d+"
    assert re.sub(number, "", printed) == re.sub(number, "", shown)
    found, stored = ([float(x) for x in re.findall(number, text)] for text in (printed, shown))
    assert len(found) > 20 and found == pytest.approx(
        stored, abs=0.02
    )  # processors round otherwise
