"""A decoder of the transformers library on characters or subwords, trained by Lightning."""

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
        vocabulary_size: Number of distinct characters, or of subwords.
        preset: Sizes and schedule, as a dict.
    """
    return CharacterDecoder(arch, vocabulary_size, Preset(**preset))


class CharacterDecoder(L.LightningModule):
    """Next-token prediction with AdamW, warm-up and a cosine that ends at a tenth.

    Tokens are characters, whose loss is logged in bits per character, or subwords, whose loss is
    logged in nats per token and in bits per byte.

    Args:
        arch: "gpt2" or "llama".
        vocabulary_size: Number of distinct characters, or of subwords.
        preset: Sizes and schedule.
        compiled: Whether the blocks are compiled, each by itself.
        tokens_per_byte: Of the training and of the validation text, for subwords; None for
            characters.
    """

    def __init__(
        self, arch: str, vocabulary_size: int, preset: Preset, *, compiled: bool = False,
        tokens_per_byte: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # Plain values, which a checkpoint holds without code: `geomon scan` builds the model anew.
        settings = {"arch": arch, "vocabulary_size": vocabulary_size, "preset": asdict(preset)}
        self.save_hyperparameters(settings, logger=False)
        self.preset = preset
        self.network = AutoModelForCausalLM.from_config(
            configuration(arch, vocabulary_size, preset)
        )
        self._tokens_per_byte = tokens_per_byte
        self._fused = False
        if compiled:  # blocks are alike: the first one's code serves all, so it takes seconds
            for block in blocks_of(self.network):
                block.compile(dynamic=False)

    @property
    def loss_name(self) -> str:
        """What the loss is measured in."""
        return "bits_per_character" if self._tokens_per_byte is None else "nats_per_token"

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, [sequences, length, vocabulary]."""
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits

    def training_step(self, window: Tensor, index: int) -> Tensor:
        """Mean cross-entropy over windows that are one token longer than the context."""
        loss = self._loss(window)
        self._log_loss("train", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, window: Tensor, index: int) -> None:
        """Loss on held-out windows."""
        self._log_loss("validation", self._loss(window), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW without weight decay on biases and norms; one step of the schedule per update."""
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        # With a gradient scaler, which "16-mixed" has, Lightning clips no gradients of a fused one.
        on_cuda = all(parameter.is_cuda for parameter in self.parameters())
        self._fused = on_cuda and not self.preset.precision.startswith("16")
        optimizer = torch.optim.AdamW(
            groups, lr=self.preset.learning_rate, betas=(0.9, 0.95), fused=self._fused or None
        )
        schedule = LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm; a fused optimizer's directly, since Lightning refuses it even in bf16."""
        if self._fused and gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _log_loss(self, part: str, nats: Tensor, **options: Any) -> None:
        """Log the loss of a part of the text, "train" or "validation", in its units."""
        if self._tokens_per_byte is None:
            self.log(f"{part}/bits_per_character", nats / math.log(2), **options)
            return
        tokens_per_byte = self._tokens_per_byte[part == "validation"]
        self.log(f"{part}/nats_per_token", nats, **options)
        self.log(f"{part}/bits_per_byte", bits_per_byte(nats, tokens_per_byte), **options)

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
    return nats_per_token(logits, characters) / math.log(2)


def nats_per_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each token of windows but the first, its mean.

    Args:
        logits: What the model has returned for the windows, [sequences, length, vocabulary].
        tokens: The windows, [sequences, length].
    """
    return _nats(logits[:, :-1], tokens[:, 1:])


def bits_per_byte(nats: Tensor, tokens_per_byte: float) -> Tensor:
    """Loss in bits for each byte of a text, by which vocabularies compare.

    Args:
        nats: Mean cross-entropy of the text's tokens.
        tokens_per_byte: Tokens of the text over its bytes in UTF-8.

    Example:
        >>> bits_per_byte(torch.tensor(16.0).log(), 1 / 4)
        tensor(1.)
    """
    return nats * tokens_per_byte / math.log(2)


def blocks_of(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of one of the recipe's decoders."""
    decoder: Any = network.base_model
    return list(decoder.h if hasattr(decoder, "h") else decoder.layers)


def _nats(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that follow."""
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
