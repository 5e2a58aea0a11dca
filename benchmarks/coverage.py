"""Do the intervals cover? Trained models measured on many fresh draws of text.

    python -m benchmarks.coverage [--draws 60] [--steps 400] [--model NAME ...]

Each model is measured on fresh batches of 128 sequences of 64 characters, as a reading of the
recipe measures them (two splits of 4,096 rows). An interval covers where value +- margin contains
the mean of the values over all draws. Of 60 intervals of 95 %, between 53 and 60 cover by chance.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

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

from geomon import measure
from recipes.enwik8.data import Corpus, load

SEQUENCES, LENGTH = 128, 64
# A mask token, for the encoder alone.
_MASK = 255


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
NEOX = {
    "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
# Name, model, share of --steps that it is trained for, and where its tokens come from.
MODELS: dict[str, tuple[Callable[[], nn.Module], float, str]] = {
    "recipe's decoder (GPT-2)": (causal(GPT2Config, **GPT2), 1.0, "text"),
    "the same, trained shortly": (causal(GPT2Config, **GPT2), 0.1, "text"),
    "Llama, grouped queries": (causal(LlamaConfig, **LLAMA), 1.0, "text"),
    "GPT-NeoX": (causal(GPTNeoXConfig, **NEOX), 1.0, "text"),
    "BERT encoder": (encoder, 1.0, "text"),
    "GPT-2 untrained, Zipf's tokens": (causal(GPT2Config, **GPT2), 0.0, "zipf"),
}


def batches(ids: np.ndarray, count: int, size: int, source: str, seed: int) -> Iterator[Tensor]:
    """Draw batches of random windows of a text, or of independent tokens of Zipf's law."""
    generator = np.random.default_rng(seed)
    law = 1 / np.arange(1, 257)
    for _ in range(count):
        if source == "zipf":
            drawn = generator.choice(256, (size, LENGTH), p=law / law.sum())
        else:
            starts = generator.integers(0, len(ids) - LENGTH, size)
            drawn = ids[starts[:, None] + np.arange(LENGTH)]
        yield torch.from_numpy(drawn.astype(np.int64))


def train(model: nn.Module, corpus: Corpus, steps: int) -> float:
    """Train on the text, and return the last loss in bits per character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(math.nan)
    for step, batch in enumerate(batches(corpus.train, steps, 32, "text", seed=1)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 0.1 + 1 - step / steps)
        if isinstance(model, BertForMaskedLM):
            hidden = torch.rand(batch.shape, generator=torch.Generator().manual_seed(step)) < 0.15
            logits = model(batch.masked_fill(hidden, _MASK)).logits
            loss = F.cross_entropy(logits[hidden], batch[hidden])
        else:
            logits = model(batch, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss) / math.log(2)


def covered(model: nn.Module, corpus: Corpus, draws: int, source: str) -> dict[str, list[str]]:
    """Measure fresh draws, and count the intervals that contain the mean over draws."""
    values: dict[str, list[float]] = defaultdict(list)
    for batch in batches(corpus.validation, draws, SEQUENCES, source, seed=2):
        found = measure(model, batch, tokens=4096, batches=2)
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
            f"{inside.mean():.3f}",
        ]
    return rows


def main() -> None:
    """Train, measure, and print a table for each model."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--draws", type=int, default=60)
    options.add_argument("--steps", type=int, default=400, help="of the training of each model")
    options.add_argument("--model", nargs="*", default=[*MODELS], choices=[*MODELS])
    given = options.parse_args()
    corpus = load()
    every: dict[str, list[float]] = defaultdict(list)
    for name in given.model:
        began = time.monotonic()
        torch.manual_seed(0)
        make, share, source = MODELS[name]
        model = make()
        bits = train(model, corpus, round(share * given.steps))
        model.eval()
        rows = covered(model, corpus, given.draws, source)
        print(f"\n## {name}: {bits:.2f} bits per character, {time.monotonic() - began:.0f} s")
        print(f"{'value':45s} {'mean':>9s} {'margin':>9s} {'1.96 sd':>9s} {'covered':>8s}")
        for tag, row in rows.items():
            print(f"{tag:45s} " + " ".join(f"{word:>9s}" for word in row), flush=True)
            every[tag.split("/")[0] + ("/mean" if "/mean" in tag else "")].append(float(row[3]))
    print("\n## Lowest, mean and highest coverage over layers and models")
    for metric, shares in every.items():
        print(f"{metric:35s} {min(shares):.3f} {np.mean(shares):.3f} {max(shares):.3f}")


if __name__ == "__main__":
    main()
