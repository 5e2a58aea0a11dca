"""The tests with W&B do not hang on each other."""

from pathlib import Path

import pytest
import wandb


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_has_a_folder_of_its_own(tmp_path, monkeypatch, turn):
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert Path(wandb.setup().settings.root_dir) == tmp_path
