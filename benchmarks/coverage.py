"""Do the intervals cover? Trained models measured on many fresh draws of text.

Each model is measured on fresh batches of 64 sequences of 64 characters, 4,096 rows, as a reading
measures them; one on 48 padded documents of 8 to 256 characters (log-normal, median 33). An
interval covers where value +- margin contains the mean of the values over all draws. Of 60
intervals of 95 %, between 53 and 60 cover by chance. `mean_norm` is a metric of a user's own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from benchmarks.timing import print_machine, print_table
from geomon import METRICS, measure
from recipes.enwik8.data import Corpus, load

SEQUENCES, LENGTH = 64, 64
# Documents of unequal length, padded: how many, and the longest.
DOCUMENTS, LONGEST = 48, 256
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
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
}  # fmt: skip
# Name, model, share of --steps that it is trained for, and whether it reads documents.
MODELS: dict[str, tuple[Callable[[], nn.Module], float, bool]] = {
    "GPT-2": (causal(GPT2Config, **GPT2), 1.0, False),
    "GPT-2, untrained": (causal(GPT2Config, **GPT2), 0.0, False),
    "BERT": (encoder, 1.0, False),
    "Llama, padded documents": (causal(LlamaConfig, **LLAMA), 1.0, True),
}


def batches(
    ids: np.ndarray, count: int, size: int, seed: int, *, documents: bool
) -> Iterator[dict[str, Tensor]]:
    """Draw batches of text, or of padded documents."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        if documents:
            yield padded(ids, generator)
            continue
        starts = generator.integers(0, len(ids) - LENGTH, size)
        drawn = ids[starts[:, None] + np.arange(LENGTH)]
        yield {"input_ids": torch.from_numpy(drawn.astype(np.int64))}


def padded(ids: np.ndarray, generator: np.random.Generator) -> dict[str, Tensor]:
    """Draw documents, each in a row of its own, with padding behind it."""
    tokens = torch.zeros(DOCUMENTS, LONGEST, dtype=torch.int64)
    real = torch.zeros_like(tokens)
    for row in range(DOCUMENTS):
        some = int(np.clip(np.exp(generator.normal(3.5, 1.0)), 8, LONGEST))
        start = generator.integers(0, len(ids) - some)
        tokens[row, :some] = torch.from_numpy(ids[start : start + some].astype(np.int64))
        real[row, :some] = 1
    longest = int(real.sum(dim=1).max())
    return {"input_ids": tokens[:, :longest], "attention_mask": real[:, :longest]}


def train(model: nn.Module, corpus: Corpus, steps: int, *, documents: bool) -> float:
    """Train on the text, and return the last loss in bits per character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(math.nan)
    for step, inputs in enumerate(batches(corpus.train, steps, 32, 1, documents=documents)):
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
    model: nn.Module, corpus: Corpus, draws: int, metrics: dict[str, Any], *, documents: bool
) -> Iterator[tuple[str, ...]]:
    """Measure fresh draws; yields a row for each value: how often its interval has the mean."""
    values: dict[str, list[float]] = defaultdict(list)
    for batch in batches(corpus.validation, draws, SEQUENCES, 2, documents=documents):
        found = measure(model, batch, metrics=metrics, tokens=4096)
        margins = {f"{tag}/margin": found.get(f"{tag}/margin", np.nan) for tag in found}
        for tag, value in (margins | found).items():
            values[tag].append(value)
    for tag in sorted(values):
        base = tag.removesuffix("/margin")
        if base == tag or np.isnan(values[tag]).all():
            continue
        truth = np.mean(values[base])
        inside = np.abs(np.array(values[base]) - truth) <= np.array(values[tag])
        width, spread = float(np.mean(values[tag])), 1.96 * float(np.std(values[base], ddof=1))
        ratio = width / spread if spread else np.nan
        yield (
            base, f"{truth:.4g}", f"{width:.2g}", f"{spread:.2g}", f"{ratio:.2f}",
            f"{inside.mean():.3f}",
        )  # fmt: skip


def main(
    draws: Annotated[int, typer.Option(help="Batches on which each model is measured.")] = 60,
    steps: Annotated[int, typer.Option(help="Steps of the training of each model.")] = 400,
    only: Annotated[str, typer.Option(help="Models whose names contain this text.")] = "",
) -> None:
    """Train, measure, and print a table for each model."""
    metrics = METRICS | {"mean_norm": mean_norm}
    corpus = load()
    for name, (make, share, documents) in MODELS.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model = make()
        bits = train(model, corpus, round(share * steps), documents=documents)
        model.eval()
        print_table(
            f"{name}, {draws} draws, {bits:.2f} bits per character",
            ("value", "mean", "margin", "1.96 deviations", "ratio", "covered"),
            covered(model, corpus, draws, metrics, documents=documents),
        )
    print_machine()


if __name__ == "__main__":
    typer.run(main)
