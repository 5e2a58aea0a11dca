"""`python -m benchmarks.gpu` at its tiny sizes: it runs without an accelerator too."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_it_prints_its_tables_without_an_accelerator():
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", "small", "--steps", "8"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "no accelerator" in done.stdout.splitlines()[0]
    assert re.findall(r"^(\w+): \d+ s since", done.stdout, re.MULTILINE) == ["small"]
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert int(cells["defaults"][5]) >= 1  # readings
    # How long it takes depends on what else the machine does: that it was timed is what counts.
    assert all(math.isfinite(float(cell)) for cell in cells["reading, on the host"][:4])
