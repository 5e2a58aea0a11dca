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
        context: Tokens in one training window: characters, or subwords.
        batch: Windows in one batch, on each device.
        steps: Optimizer updates.
        warmup: Updates until the learning rate is at its highest.
        learning_rate: The highest.
        dropout: Probability, everywhere the model has one.
        precision: As Lightning names it.
        vocabulary: Subwords of the vocabulary that is trained on the text; None for characters.
        compiled: Whether the blocks are compiled on a CUDA device, unless asked otherwise.
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
    vocabulary: int | None = None
    compiled: bool = False


PRESETS = {
    # Two cores, a few minutes: the smallest run that shows the expansion and the compression.
    "cpu": Preset(4, 128, 4, 64, 32, 1_500, 100, 2e-3, 0.0, "32-true"),
    # One small GPU, well under an hour.
    "small": Preset(6, 384, 6, 256, 64, 5_000, 200, 1e-3, 0.1, "bf16-mixed"),
    # One large GPU, 131 million subwords: the size of the smallest GPT-2.
    "base": Preset(
        12, 768, 12, 1024, 16, 8_000, 400, 6e-4, 0.0, "bf16-mixed", vocabulary=16_384, compiled=True
    ),
}


def preset_for_hardware() -> str:
    """The largest preset of characters that the hardware trains in sensible time."""
    return "small" if torch.cuda.is_available() else "cpu"
