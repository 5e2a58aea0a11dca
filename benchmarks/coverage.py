"""Do the intervals cover? Trained models measured on many fresh draws of text.

    python -m benchmarks.coverage [--draws 60] [--steps 400] [--model NAME ...] [--metric NAME ...]

Each model is measured on fresh batches of 64 sequences of 64 characters, 4,096 rows, as a reading
measures them; two models on documents of 8 to 256 characters (log-normal, median 33), of which 48
are padded to one length, or which fill 16 rows of 256 characters one behind another. An interval
covers where value +- margin contains the mean of the values over all draws. Of 60 intervals of
95 %, between 53 and 60 cover by chance. `mean_norm` is a metric of a user's own.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
)

from geomon import METRICS, MORE_METRICS, measure
from recipes.enwik8.data import Corpus, load

SEQUENCES, LENGTH = 64, 64
# Documents of unequal length: how many are padded, and how many rows others fill, of what length.
DOCUMENTS, FILLED, LONGEST = 48, 16, 256
# A mask token, for the encoder alone.
_MASK = 255


def mean_norm(hidden: Tensor) -> Tensor:
    """A metric of a user's own: the mean length of a row."""
    return hidden.norm(dim=1).mean()


def causal(config: type[PretrainedConfig], **sizes: int) -> Callable[[], nn.Module]:
    """Make a decoder of the transformers library from nothing."""
    return lambda: AutoModelForCausalLM.from_config(
        config(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)
    )


def encoder() -> nn.Module:
    """A small BERT, trained to restore masked characters."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=256, hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=384, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


GPT2 = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
LLAMA = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
LONG = LLAMA | {"max_position_embeddings": LONGEST, "num_hidden_layers": 3, "hidden_size": 64}
NEOX = {
    "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
# Name, model, share of --steps that it is trained for, and where its tokens come from.
MODELS: dict[str, tuple[Callable[[], nn.Module], float, str]] = {
    "recipe's decoder (GPT-2)": (causal(GPT2Config, **GPT2), 1.0, "text"),
    "the same, untrained": (causal(GPT2Config, **GPT2), 0.0, "text"),
    "the same, a quarter of the steps": (causal(GPT2Config, **GPT2), 0.25, "text"),
    "Llama, grouped queries": (causal(LlamaConfig, **LLAMA), 1.0, "text"),
    "GPT-NeoX": (causal(GPTNeoXConfig, **NEOX), 1.0, "text"),
    "BERT encoder": (encoder, 1.0, "text"),
    "GPT-2 untrained, Zipf's tokens": (causal(GPT2Config, **GPT2), 0.0, "zipf"),
    "Llama, padded documents": (causal(LlamaConfig, **LONG), 1.0, "padded"),
    "Llama, packed documents": (causal(LlamaConfig, **LONG), 1.0, "packed"),
}


def batches(
    ids: np.ndarray, count: int, size: int, source: str, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Draw batches of random windows of a text, of documents, or of tokens of Zipf's law."""
    generator = np.random.default_rng(seed)
    law = 1 / np.arange(1, 257)
    for _ in range(count):
        if source in ("padded", "packed"):
            make = padded if source == "padded" else packed
            yield make(ids, generator)
            continue
        if source == "zipf":
            drawn = generator.choice(256, (size, LENGTH), p=law / law.sum())
        else:
            starts = generator.integers(0, len(ids) - LENGTH, size)
            drawn = ids[starts[:, None] + np.arange(LENGTH)]
        yield {"input_ids": torch.from_numpy(drawn.astype(np.int64))}


def length(generator: np.random.Generator) -> int:
    """Draw the length of a document."""
    return int(np.clip(np.exp(generator.normal(3.5, 1.0)), 8, LONGEST))


def padded(ids: np.ndarray, generator: np.random.Generator) -> dict[str, Tensor]:
    """Draw documents, each in a row of its own, with padding behind it."""
    tokens = torch.zeros(DOCUMENTS, LONGEST, dtype=torch.int64)
    real = torch.zeros_like(tokens)
    for row in range(DOCUMENTS):
        some = length(generator)
        start = generator.integers(0, len(ids) - some)
        tokens[row, :some] = torch.from_numpy(ids[start : start + some].astype(np.int64))
        real[row, :some] = 1
    longest = int(real.sum(dim=1).max())
    return {"input_ids": tokens[:, :longest], "attention_mask": real[:, :longest]}


def packed(ids: np.ndarray, generator: np.random.Generator) -> dict[str, Tensor]:
    """Draw documents that fill rows one behind another; the last one of a row is cut off."""
    tokens = torch.zeros(FILLED, LONGEST, dtype=torch.int64)
    places = torch.zeros_like(tokens)
    for row in range(FILLED):
        begin = 0
        while begin < LONGEST:
            some = min(length(generator), LONGEST - begin)
            start = generator.integers(0, len(ids) - some)
            text = torch.from_numpy(ids[start : start + some].astype(np.int64))
            tokens[row, begin : begin + some] = text
            places[row, begin : begin + some] = torch.arange(some)
            begin += some
    return {"input_ids": tokens, "position_ids": places}


def train(model: nn.Module, corpus: Corpus, steps: int, source: str) -> float:
    """Train on the text, and return the last loss in bits per character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(math.nan)
    for step, inputs in enumerate(batches(corpus.train, steps, 32, source, seed=1)):
        batch = inputs["input_ids"]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 0.1 + 1 - step / steps)
        if isinstance(model, BertForMaskedLM):
            hidden = torch.rand(batch.shape, generator=torch.Generator().manual_seed(step)) < 0.15
            logits = model(batch.masked_fill(hidden, _MASK)).logits
            loss = F.cross_entropy(logits[hidden], batch[hidden])
        else:
            logits = model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss) / math.log(2)


def covered(
    model: nn.Module, corpus: Corpus, draws: int, source: str, metrics: dict[str, Any]
) -> dict[str, list[str]]:
    """Measure fresh draws, and count the intervals that contain the mean over draws."""
    values: dict[str, list[float]] = defaultdict(list)
    for batch in batches(corpus.validation, draws, SEQUENCES, source, seed=2):
        found = measure(model, batch, metrics=metrics, tokens=4096)
        margins = {f"{tag}/margin": found.get(f"{tag}/margin", np.nan) for tag in found}
        for tag, value in (margins | found).items():
            values[tag].append(value)
    rows: dict[str, list[str]] = {}
    for tag in sorted(values):
        base = tag.removesuffix("/margin")
        if base == tag or np.isnan(values[tag]).all():
            continue
        truth = np.mean(values[base])
        inside = np.abs(np.array(values[base]) - truth) <= np.array(values[tag])
        width, spread = float(np.mean(values[tag])), float(np.std(values[base], ddof=1))
        rows[base] = [
            f"{truth:.4g}",
            f"{width:.2g}",
            f"{1.96 * spread:.2g}",
            f"{width / (1.96 * spread) if spread else np.nan:.2f}",
            f"{inside.mean():.3f}",
        ]
    return rows


def main() -> None:
    """Train, measure, and print a table for each model."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--draws", type=int, default=60)
    options.add_argument("--steps", type=int, default=400, help="of the training of each model")
    options.add_argument("--model", nargs="*", default=[*MODELS], choices=[*MODELS])
    every_metric = METRICS | MORE_METRICS | {"mean_norm": mean_norm}
    options.add_argument(
        "--metric", nargs="*", default=[*METRICS, "mean_norm"], choices=[*every_metric]
    )
    given = options.parse_args()
    metrics = {name: every_metric[name] for name in given.metric}
    corpus = load()
    every: dict[str, list[float]] = defaultdict(list)
    for name in given.model:
        began = time.monotonic()
        torch.manual_seed(0)
        make, share, source = MODELS[name]
        model = make()
        bits = train(model, corpus, round(share * given.steps), source)
        model.eval()
        rows = covered(model, corpus, given.draws, source, metrics)
        print(f"\n## {name}: {bits:.2f} bits per character, {time.monotonic() - began:.0f} s")
        heads = ("mean", "margin", "1.96 sd", "ratio", "covered")
        print(f"{'value':45s} " + " ".join(f"{head:>9s}" for head in heads))
        for tag, row in rows.items():
            print(f"{tag:45s} " + " ".join(f"{word:>9s}" for word in row), flush=True)
            every[tag.split("/")[0] + ("/mean" if "/mean" in tag else "")].append(float(row[-1]))
    print("\n## Lowest, mean and highest coverage over layers and models")
    for metric, shares in every.items():
        print(f"{metric:35s} {min(shares):.3f} {np.mean(shares):.3f} {max(shares):.3f}")


if __name__ == "__main__":
    main()
