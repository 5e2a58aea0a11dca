"""Files that are there whole or not at all."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> Path:
    """Write a file of JSON, whole or not at all.

    Returns:
        Path of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    return part.replace(path)
