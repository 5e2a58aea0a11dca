"""`geomon.scan` against a live record: equal values, going on after a kill, and peak memory.

    OMP_NUM_THREADS=1 python -W ignore -m benchmarks.scanning

The recipe's model is trained on the bytes of README.md, watched on a probe every ten steps and
saved every ten. A scan of the checkpoints runs in a process that is killed after its third reading
and is then started again. The peak of resident memory is taken in processes of their own, on one
and on eight checkpoints of a larger model.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import lightning as L
import torch
import typer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.attention_memory import peak_beyond
from geomon import every, read, scan, select
from geomon.lightning import GeometryMonitor
from recipes.enwik8.model import CharacterDecoder, build
from recipes.enwik8.presets import PRESETS

README = Path(__file__).parent.parent / "README.md"
STEPS = 80
EVERY = 10
TOKENS = 1024
PRESET = replace(PRESETS["cpu"], steps=STEPS, warmup=10)
LARGE = replace(PRESET, layers=6, width=512, heads=8)
WORDS = 256


def _windows(count: int, length: int, seed: int) -> Tensor:
    text = torch.tensor(list(README.read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def _train(folder: Path) -> None:
    probe = _windows(32, PRESET.context, seed=1)
    torch.save(probe, folder / "probe.pt")
    torch.manual_seed(0)
    monitor = GeometryMonitor(
        probe=probe, schedule=every(EVERY), tokens=TOKENS, directory=folder / "live"
    )
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, callbacks=[monitor, saving],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    data = _windows(STEPS * PRESET.batch, PRESET.context + 1, seed=0)
    trainer.fit(CharacterDecoder("gpt2", WORDS, PRESET), DataLoader(data, batch_size=PRESET.batch))


def _scan(folder: Path) -> None:
    scan(
        build, checkpoints=folder / "checkpoints", inputs=torch.load(folder / "probe.pt"),
        tokens=TOKENS, directory=folder / "scan",
    )  # fmt: skip


def _in_process(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scanning", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _compare(folder: Path) -> None:
    record = folder / "scan" / "readings.jsonl"
    first = _in_process("--part", "scan", "--folder", str(folder))
    while _lines(record) < 4 and first.poll() is None:  # the run's description, three readings
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    print(f"killed with {_lines(record) - 1} of {STEPS // EVERY} readings recorded")
    _in_process("--part", "scan", "--folder", str(folder)).wait()
    live = {reading.step: reading for reading in read(folder / "live")}
    readings = read(folder / "scan")
    different = compared = 0
    for reading in readings:
        theirs = live[reading.step].values
        for tag, value in reading.values.items():
            if not tag.startswith(("geomon/", "training/")):
                compared += 1
                different += repr(theirs[tag]) != repr(value)
    print(
        f"scan, started again: steps {[reading.step for reading in readings]}; "
        f"{different} of {compared} values differ from the live record's"
    )


def _save_large(folder: Path, count: int) -> None:
    """Files as Lightning writes them, with the two moments of Adam."""
    settings = {"arch": "gpt2", "vocabulary_size": WORDS, "preset": asdict(LARGE)}
    (folder / "checkpoints").mkdir(parents=True)
    for step in range(count):
        weights = build(**settings).state_dict()
        moments = {name: torch.stack([value, value]) for name, value in weights.items()}
        torch.save(
            {
                "state_dict": weights, "global_step": step, "hyper_parameters": settings,
                "optimizer_states": [moments],
            },
            folder / "checkpoints" / f"step={step}.ckpt",
        )  # fmt: skip


def _peak(folder: Path) -> None:
    """Print the peak of memory of a scan above what the imports take."""
    metrics = select("anisotropy", "cosine", "qk_cosine", "attention_entropy")
    inputs = _windows(8, LARGE.context, seed=1)
    build("gpt2", WORDS, asdict(replace(LARGE, layers=1, width=8, heads=1)))  # all imports
    gc.collect()

    def run() -> None:
        scan(
            build, checkpoints=folder / "checkpoints", inputs=inputs, tokens=256,
            metrics=metrics, directory=folder / "scan",
        )  # fmt: skip

    print(round(peak_beyond(run)))


def _memory(folder: Path) -> None:
    weights = sum(p.numel() for p in CharacterDecoder("gpt2", WORDS, LARGE).parameters()) * 4
    for count in (1, 8):
        own = folder / str(count)
        _save_large(own, count)
        size = next((own / "checkpoints").iterdir()).stat().st_size
        said, _ = _in_process("--part", "peak", "--folder", str(own)).communicate()
        print(
            f"{count} checkpoints of {size / 1e6:.0f} MB, weights {weights / 1e6:.0f} MB: "
            f"peak {said.strip()} MB above the imports"
        )


def main(
    part: Annotated[str, typer.Option(help="values, memory, or both where not given.")] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train, scan with a kill in the middle, compare, and measure memory."""
    if folder is not None:
        {"scan": _scan, "peak": _peak}[part](folder)
        return
    with tempfile.TemporaryDirectory() as made:
        if part in ("", "values"):
            _train(Path(made))
            _compare(Path(made))
        if part in ("", "memory"):
            _memory(Path(made))


if __name__ == "__main__":
    typer.run(main)
