"""docs/multimax.ipynb runs as it stands and prints what it shows."""

import json
import os
import re
import subprocess
import sys

import pytest
from commands import ROOT

pytestmark = pytest.mark.long


def test_notebook_prints_its_stored_output():
    cells = json.loads((ROOT / "docs" / "multimax.ipynb").read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    shown = "".join(
        "".join(output["text"])
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "stream"
    )
    environment = {**os.environ, "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    number = r"\d+\.\d+"
    assert re.sub(number, "", printed) == re.sub(number, "", shown)
    found, stored = ([float(x) for x in re.findall(number, text)] for text in (printed, shown))
    assert len(found) > 20 and found == pytest.approx(
        stored, abs=0.02
    )  # processors round otherwise
