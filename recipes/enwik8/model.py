"""A character-level decoder of the transformers library, trained by Lightning."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from recipes.enwik8.presets import Preset

ARCHITECTURES = ("gpt2", "llama")


def configuration(arch: str, vocabulary_size: int, preset: Preset) -> PretrainedConfig:
    """Configuration of a decoder that is built from nothing.

    Raises:
        ValueError: An architecture that the recipe does not know.
    """
    if arch == "gpt2":
        return GPT2Config(
            vocab_size=vocabulary_size,
            n_positions=preset.context,
            n_embd=preset.width,
            n_layer=preset.layers,
            n_head=preset.heads,
            resid_pdrop=preset.dropout,
            embd_pdrop=preset.dropout,
            attn_pdrop=preset.dropout,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own function, in one kernel
            bos_token_id=None,
            eos_token_id=None,
        )
    if arch == "llama":
        return LlamaConfig(
            vocab_size=vocabulary_size,
            max_position_embeddings=preset.context,
            hidden_size=preset.width,
            intermediate_size=8 * preset.width // 3,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            attention_dropout=preset.dropout,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    raise ValueError(f"--arch {arch!r} is not known: expected one of {', '.join(ARCHITECTURES)}")


def build(arch: str, vocabulary_size: int, preset: Mapping[str, Any]) -> "CharacterDecoder":
    """Build the model of a checkpoint from the hyper-parameters that the checkpoint holds.

    Args:
        arch: "gpt2" or "llama".
        vocabulary_size: Number of distinct characters.
        preset: Sizes and schedule, as a dict.
    """
    return CharacterDecoder(arch, vocabulary_size, Preset(**preset))


class CharacterDecoder(L.LightningModule):
    """Next-character prediction with AdamW, warm-up and a cosine that ends at a tenth.

    Args:
        arch: "gpt2" or "llama".
        vocabulary_size: Number of distinct characters.
        preset: Sizes and schedule.
        compiled: Whether the network is compiled.
    """

    def __init__(
        self, arch: str, vocabulary_size: int, preset: Preset, *, compiled: bool = False
    ) -> None:
        super().__init__()
        # Plain values, which a checkpoint holds without code: `geomon scan` builds the model anew.
        settings = {"arch": arch, "vocabulary_size": vocabulary_size, "preset": asdict(preset)}
        self.save_hyperparameters(settings, logger=False)
        self.preset = preset
        self.network = AutoModelForCausalLM.from_config(
            configuration(arch, vocabulary_size, preset)
        )
        if compiled:  # the network, not this module: Lightning's self.log does not compile
            self.network.compile()

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next character, [sequences, length, vocabulary]."""
        logits: Tensor = self.network(input_ids=characters, use_cache=False).logits
        return logits

    def training_step(self, window: Tensor, index: int) -> Tensor:
        """Mean cross-entropy over windows that are one character longer than the context."""
        loss = self._loss(window)
        self.log("train/bits_per_character", loss.detach() / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, window: Tensor, index: int) -> None:
        """Bits per character on held-out windows."""
        bits = self._loss(window) / math.log(2)
        self.log("validation/bits_per_character", bits, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW without weight decay on biases and norms; one step of the schedule per update."""
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.preset.learning_rate, betas=(0.9, 0.95))
        schedule = LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        """Share of the highest learning rate at a step."""
        warmup, steps = self.preset.warmup, self.preset.steps
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def _loss(self, window: Tensor) -> Tensor:
        return _nats(self(window[:, :-1]), window[:, 1:])


def bits_per_character(logits: Tensor, characters: Tensor) -> Tensor:
    """Bits that a model needs for each character of windows but the first, their mean.

    Args:
        logits: What the model has returned for the windows, [sequences, length, vocabulary].
        characters: The windows, [sequences, length].
    """
    return _nats(logits[:, :-1], characters[:, 1:]) / math.log(2)


def _nats(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy of the characters that follow."""
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
