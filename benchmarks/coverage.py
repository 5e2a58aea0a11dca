"""Do the intervals cover? Models measured on many fresh draws of text.

Each model is measured on fresh batches of 32 sequences of 32 characters and of 64 of 64, 1,024 and
4,096 rows, as a reading measures them; one on 48 padded documents of 8 to 256 characters
(log-normal, median 33). An interval covers if value +- margin contains the mean of the values over
all draws. Of 60 intervals of 95 %, between 53 and 60 cover by chance. `mean_norm` is a metric
of a user's own.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Annotated

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
from recipes.enwik8.text import Text, load, windows

SHOWN = (
    "twonn", "twonn_distinct", "gride/k1", "gride/k8", "gride/k32", "anisotropy", "effective_rank",
    "cosine", "drift_norm", "variance", "within_variance", "variance_shares", "norm_variance_slope",
    "qk_cosine", "attention_entropy", "attention_sink", "mean_norm",
)  # fmt: skip
SIZES = ((32, 32), (64, 64))
LENGTH = 64  # of the windows that are trained on
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
DECODER = causal(GPT2Config, **GPT2)  # as the recipe's, of its smallest size
# Name, model, steps of its training, and whether it reads documents.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "decoder, untrained": (DECODER, 0, False),
    "decoder, 100 steps": (DECODER, 100, False),
    "decoder, 1,000 steps": (DECODER, 1_000, False),
    "Llama, 400 steps": (causal(LlamaConfig, **LLAMA), 400, False),
    "BERT, 400 steps": (encoder, 400, False),
    "Llama, padded documents": (causal(LlamaConfig, **LLAMA), 400, True),
}


def batches(
    ids: np.ndarray, count: int, size: int, seed: int, *, documents: bool, length: int = LENGTH
) -> Iterator[dict[str, Tensor]]:
    """Draw batches of text, or of padded documents."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        if documents:
            yield padded(ids, generator)
            continue
        starts = generator.integers(0, len(ids) - length, size)
        yield {"input_ids": windows(ids, starts, length)}


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


def train(model: nn.Module, corpus: Text, steps: int, *, documents: bool) -> float:
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
    model: nn.Module, corpus: Text, draws: int, size: tuple[int, int], *, documents: bool
) -> dict[str, tuple[float, float]]:
    """Measure fresh draws.

    Returns:
        Share of the intervals that hold the mean, and their width for the scatter of the values, of
        each value that has margins in most draws.
    """
    values: dict[str, list[float]] = defaultdict(list)
    count, length = size
    drawn = batches(corpus.validation, draws, count, 2, documents=documents, length=length)
    for batch in drawn:
        rows = 4096 if documents else count * length
        found = measure(model, batch, metrics=METRICS | {"mean_norm": mean_norm}, tokens=rows)
        for tag in [tag for tag in found if not tag.endswith("/margin")]:
            values[tag].append(found[tag])
            values[f"{tag}/margin"].append(found.get(f"{tag}/margin", np.nan))
    result = {}
    for tag in [tag for tag in values if not tag.endswith("/margin")]:
        own, width = np.array(values[tag]), np.array(values[f"{tag}/margin"])
        known, spread = np.isfinite(width), float(1.96 * own.std(ddof=1))
        if known.mean() >= 0.5 and spread > 1e-6 * abs(own.mean()):  # NaN is not above
            inside = np.abs(own - own.mean())[known] <= width[known]
            result[tag] = float(inside.mean()), float(width[known].mean()) / spread
    return result


def in_words(name: str, found: dict[str, tuple[float, float]]) -> str:
    """Lowest and highest coverage over layers; of the mean over layers, and its width."""
    metric, _, part = name.partition("/")
    end = f"/{part}" if part else ""
    layers = [
        share
        for tag, (share, _) in found.items()
        if re.fullmatch(f"{metric}/layer_[0-9]+{end}", tag)
    ]
    mean = found.get(f"{metric}/mean{end}")
    if not layers or mean is None:
        return "-"
    return f"{min(layers):.2f} to {max(layers):.2f}; {mean[0]:.2f} ({mean[1]:.1f})"


def main(
    draws: Annotated[int, typer.Option(help="Batches on which each model is measured.")] = 60,
    only: Annotated[str, typer.Option(help="Models whose names contain this text.")] = "",
) -> None:
    """Train, measure, and print a table for each size, and the values that cover least."""
    corpus = load()
    results: dict[tuple[int, str], dict[str, tuple[float, float]]] = {}
    for name, (make, steps, documents) in MODELS.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model = make()
        train(model, corpus, steps, documents=documents)
        for size in SIZES[1:] if documents else SIZES:
            found = covered(model.eval(), corpus, draws, size, documents=documents)
            results[math.prod(size), name] = found
            few = {tag: share for tag, (share, _) in found.items() if share < 0.85}
            mean = np.mean([share for share, _ in found.values()])
            print(f"{name}, {math.prod(size):,} rows: mean {mean:.3f} of {len(found)}; below .85: "
                  f"{', '.join(f'{tag} {share:.2f}' for tag, share in few.items()) or 'none'}",
                  flush=True)  # fmt: skip
    for rows in map(math.prod, SIZES):
        models = [name for of, name in results if of == rows]
        print_table(
            f"{rows:,} rows, {draws} draws",
            ("value", *models),
            [
                [value, *(in_words(value, results[rows, name]) for name in models)]
                for value in SHOWN
            ],
        )
    print_machine()


if __name__ == "__main__":
    typer.run(main)
