"""Sizes of model and run, chosen by the hardware unless named."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Attributes:
        layers: Blocks of the decoder.
        width: Of the hidden states.
        heads: Of attention, in each block.
        context: Characters in one training window.
        batch: Windows in one batch, on each device.
        steps: Optimizer updates.
        warmup: Updates until the learning rate is at its highest.
        learning_rate: The highest.
        dropout: Probability, everywhere the model has one.
        precision: As Lightning names it.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    warmup: int
    learning_rate: float
    dropout: float
    precision: str


PRESETS = {
    # Two cores, a few minutes: the smallest run that shows the expansion and the compression.
    "cpu": Preset(4, 128, 4, 64, 32, 1_500, 100, 2e-3, 0.0, "32-true"),
    # One small GPU, well under an hour.
    "small": Preset(6, 384, 6, 256, 64, 5_000, 200, 1e-3, 0.1, "bf16-mixed"),
    # One large GPU: the size of the papers' character models.
    "base": Preset(12, 512, 8, 512, 64, 20_000, 500, 6e-4, 0.1, "bf16-mixed"),
}


def preset_for_hardware() -> str:
    """The largest preset that the hardware trains in sensible time."""
    if not torch.cuda.is_available():
        return "cpu"
    return "base" if torch.cuda.get_device_properties(0).total_memory > 20e9 else "small"
