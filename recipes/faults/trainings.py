"""Five small trainings of other kinds than the decoders: what each model is, and what it learns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from recipes.enwik8.optimizer import adamw, cosine_rate
from recipes.enwik8.text import Ids, Text
from recipes.faults.kinds import Subject
from recipes.study.text import random_windows

# Steps of a training, and those of its warm-up.
LENGTH, WARM_UP = 600, 40
SEQUENCES, CONTEXT = 8, 64
HEADS, WIDTH, LAYERS = 4, 64, 4
_NOTHING = -100  # label of a place at which nothing is asked
_HELD_OUT = 64  # sequences
_SYMBOLS = 32  # of sequences to copy
_PAIRS, _VALUES = 8, 16  # of a dictionary to look up
_SIDE, _PIXELS, _TEXTURES = 8, 4, 4  # patches in a row, pixels in a patch's row, kinds of patches
_MASKED, _COMMON = 0.15, 0.2  # shares of characters and of patches


class Batch(NamedTuple):
    """Inputs and labels of a model.

    Attributes:
        inputs: Arguments of the model by name.
        labels: Tokens to predict, int64; -100 for places without a prediction.
    """

    inputs: dict[str, Tensor]
    labels: Tensor


# Makes a batch of so many sequences of such a length.
Make = Callable[[int, int, torch.Generator], Batch]


@dataclass
class Task(Subject):
    """A training on batches of any kind.

    Attributes:
        labels: Function from the labels of a batch to those that the loss takes.
        make: Makes batches of other sizes than `draw` does.
        held_out: A batch that no step is made on.
        factor: The loss of a step is multiplied by it.
    """

    labels: Callable[[Tensor], Tensor] = lambda labels: labels
    make: Make = field(kw_only=True)
    held_out: Batch = field(kw_only=True)
    factor: float = 1.0

    def loss(self, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy over the places that have a label, in nats."""
        logits = self.model(**batch.inputs).logits
        labels = self.labels(batch.labels).flatten()
        return self.factor * F.cross_entropy(logits.flatten(0, -2), labels)

    def held_out_loss(self) -> float:
        """Compute the loss of the batch that no step is made on, without dropout."""
        self.model.eval()
        with torch.no_grad():
            logits = self.model(**self.held_out.inputs).logits
        self.model.train()
        return F.cross_entropy(logits.flatten(0, -2), self.held_out.labels.flatten()).item()


# -- what is learned -------------------------------------------------------------------------------


def _of_text(ids: Ids, ask: Callable[[Tensor, torch.Generator], Batch]) -> Make:
    def make(count: int, length: int, generator: torch.Generator) -> Batch:
        return ask(random_windows(ids, length + 1, count)(generator), generator)

    return make


def _next(windows: Tensor, generator: torch.Generator) -> Batch:
    return Batch({"input_ids": windows[:, :-1]}, windows[:, 1:].contiguous())


def _masked(windows: Tensor, generator: torch.Generator, vocabulary: int) -> Batch:
    """Characters, some of them replaced by one more symbol."""
    ids = windows[:, :-1]
    chosen = torch.rand(ids.shape, generator=generator) < _MASKED
    chosen[0, 0] = True  # a mean over no character would be none
    inputs = {"input_ids": ids.masked_fill(chosen, vocabulary)}
    return Batch(inputs, ids.masked_fill(~chosen, _NOTHING))


def _copies(count: int, length: int, generator: torch.Generator) -> Batch:
    """Random symbols, twice."""
    half = torch.randint(_SYMBOLS, (count, length // 2), generator=generator)
    return _next(torch.cat([half, half, half[:, :1]], dim=1), generator)


def _lookups(count: int, length: int, generator: torch.Generator) -> Batch:
    """A dictionary, again and again, for the encoder; keys for the decoder, which gives values."""
    keys = torch.rand(count, _PAIRS, generator=generator).argsort(dim=1) + _VALUES
    values = torch.randint(_VALUES, keys.shape, generator=generator)
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    asked = torch.randint(_PAIRS, (count, length // 2), generator=generator)
    inputs = {
        "input_ids": pairs.repeat(1, length // (2 * _PAIRS)),
        "decoder_input_ids": keys.gather(1, asked),
    }
    return Batch(inputs, values.gather(1, asked))


def _images(count: int, length: int, generator: torch.Generator) -> Batch:
    """Patches of four textures in noise; the label is the texture that is the most common."""
    labels = torch.randint(_TEXTURES, (count,), generator=generator)
    kinds = torch.randint(_TEXTURES, (count, length // _SIDE, _SIDE), generator=generator)
    is_common = torch.rand(kinds.shape, generator=generator) < _COMMON
    kinds = torch.where(is_common, labels[:, None, None], kinds)
    textures = torch.randn(_TEXTURES, _PIXELS, _PIXELS, generator=torch.Generator().manual_seed(1))
    pixels = textures[kinds].transpose(2, 3).flatten(3).flatten(1, 2)
    noise = torch.randn(pixels.shape, generator=generator)
    return Batch({"pixel_values": (pixels + 0.5 * noise)[:, None]}, labels)


# -- the trainings ---------------------------------------------------------------------------------


def _llama(vocabulary: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=8 * WIDTH // 3,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
            max_position_embeddings=2 * CONTEXT, use_cache=False, bos_token_id=None,
            eos_token_id=None,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH, image_size=_SIDE * _PIXELS, patch_size=_PIXELS,
            num_channels=1, num_labels=_TEXTURES,
        )
    )  # fmt: skip


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=_VALUES + _PAIRS, d_model=WIDTH, num_layers=LAYERS // 2,
            num_decoder_layers=LAYERS // 2, num_heads=HEADS, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH,
            dropout_rate=0.0, use_cache=False,
        )
    )  # fmt: skip


def _bert(vocabulary: int) -> nn.Module:
    """BERT with rotary positions: with learned ones, it stays at the characters' frequencies."""
    return RoFormerForMaskedLM(
        RoFormerConfig(
            vocab_size=vocabulary, embedding_size=WIDTH, hidden_size=WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH,
            max_position_embeddings=2 * CONTEXT, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=None,
        )
    )  # fmt: skip


class Kind(NamedTuple):
    """One of the trainings.

    Attributes:
        words: Description of the training, for a table.
        block: Kind of its blocks.
        model: Builds the model for so many distinct characters.
        make: Function from a text, given as ids and number of distinct ones, to one that makes
            batches.
        rate: Highest learning rate.
        is_held_out: Whether no threshold is chosen with it.
    """

    words: str
    block: str
    model: Callable[[int], nn.Module]
    make: Callable[[Ids, int], Make]
    rate: float
    is_held_out: bool


TRAININGS = {
    "llama_text": Kind(
        "Llama, characters of a text", "llama", _llama, lambda ids, count: _of_text(ids, _next),
        3e-3, is_held_out=False,
    ),
    "vit": Kind(
        "ViT, the most common texture", "vit", lambda count: _vit(), lambda ids, count: _images,
        1e-3, is_held_out=False,
    ),
    "llama_copy": Kind(
        "Llama, copies", "llama", lambda count: _llama(_SYMBOLS), lambda ids, count: _copies, 3e-3,
        is_held_out=True,
    ),
    "t5": Kind(
        "T5, look-ups", "t5", lambda count: _t5(), lambda ids, count: _lookups, 3e-3,
        is_held_out=True,
    ),
    "bert": Kind(
        "BERT, masked characters", "roformer", lambda count: _bert(count + 1),
        lambda ids, count: _of_text(ids, partial(_masked, vocabulary=count)), 2e-3,
        is_held_out=True,
    ),
}  # fmt: skip


def new_task(name: str, given: Text) -> Task:
    """Build a training."""
    kind = TRAININGS[name]
    torch.manual_seed(0)
    model = kind.model(given.vocabulary).train()
    make, share = kind.make(given.train, given.vocabulary), cosine_rate(WARM_UP, LENGTH)
    held_out = kind.make(given.validation, given.vocabulary)(
        _HELD_OUT, CONTEXT, torch.Generator().manual_seed(1)
    )
    return Task(
        model, kind.block, adamw(model, kind.rate), partial(make, SEQUENCES, CONTEXT),
        lambda step: kind.rate * share(step), given.vocabulary, make=make, held_out=held_out,
    )  # fmt: skip
