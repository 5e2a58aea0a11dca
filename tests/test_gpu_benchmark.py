"""`python -m benchmarks.gpu` at its tiny sizes: it runs without an accelerator too."""

import math
import os
import re


def test_it_prints_its_tables_without_an_accelerator(forks):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    arguments = ["--only", "small", "--steps", "8"]
    done = forks.run("benchmarks.gpu", *arguments, environment=hidden)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "no accelerator" in done.stdout.splitlines()[0]
    assert re.findall(r"^(\w+): \d+ s since", done.stdout, re.MULTILINE) == ["small"]
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert int(cells["defaults"][5]) >= 1  # readings
    # How long it takes depends on what else the machine does: that it was timed is what counts.
    assert all(math.isfinite(float(cell)) for cell in cells["reading, on the host"][:4])
