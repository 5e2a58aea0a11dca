"""Every architecture of the zoo, seen through a window, against what the model computes.

`python tests/test_architectures.py` writes docs/architectures.md from the same measurements.
"""

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geomon import describe
from geomon.description import ROUTES
from support.referee import (
    Verdict,
    compare,
    notes_of,
    refer,
    routes_of,
    seen_layers,
    watch,
    without_fast_path,
)
from support.specimens import AS_ATTENDED, PADDING_MASKS, built, inputs_of
from support.zoo import ZOO

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
TOLERANCE = 1e-5  # of attention probabilities: float32, eager against fused

EACH = pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kind) for name, specimen in ZOO.items() for kind in specimen.routes],
)
# One implementation for each route that there is in a model.
EACH_ROUTE = pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, kind)
        for name, specimen in ZOO.items()
        for kind in {route: kind for kind, route in reversed(specimen.routes.items())}.values()
    ],
)


@functools.cache
def measured(name: str, implementation: str) -> Verdict:
    """The verdict on a specimen, over padded inputs and inputs without padding."""
    specimen, verdict = ZOO[name], Verdict()
    takes_mask = bool(set(specimen.inputs()) & set(PADDING_MASKS))
    for padded in (True, False) if takes_mask else (False,):
        reference = refer(specimen, implementation, padded=padded)
        model, inputs = built(specimen, implementation), inputs_of(specimen, padded=padded)
        with torch.no_grad(), without_fast_path():
            bare = list(tensors(model(**inputs)))
            output, window = watch(model, inputs)
        verdict.identical &= _equal(bare, list(tensors(output)))
        verdict.routes |= routes_of(window, specimen.stacks)
        verdict.notes |= notes_of(window)
        compare(specimen, reference, seen_layers(window), verdict, padded=padded)
    return verdict


@functools.cache
def trains_alike(name: str, implementation: str) -> bool:
    """Whether outputs, gradients and random state are the same with an open window and dropout."""
    passes = []
    for watched in (False, True):
        model = built(ZOO[name], implementation, dropout=0.2).train()
        inputs = inputs_of(ZOO[name], padded=True)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            output = watch(model, inputs)[0] if watched else model(**inputs)
            found = list(tensors(output))
            sum(part.float().square().mean() for part in found if part.requires_grad).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            passes.append([*found, *gradients, torch.random.get_rng_state()])
    return _equal(*passes)


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a model returns, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors(part)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


@EACH
def test_what_is_captured_is_what_the_model_computes(name, implementation):
    """The specimen declares what is not seen, in geomon's words."""
    specimen, verdict = ZOO[name], measured(name, implementation)
    assert verdict.faults == []
    assert verdict.attention is None or verdict.attention < TOLERANCE
    assert verdict.projected in (None, 0)
    assert verdict.hidden == 0
    assert verdict.routes == {specimen.routes[implementation]}
    assert verdict.missing == {k: {why} for k, why in specimen.uncovered.items()}
    assert verdict.notes == set(specimen.notes)
    assert verdict.identical


@pytest.mark.parametrize("name", ZOO)
def test_describe_says_what_is_seen_and_what_is_not(name):
    specimen = ZOO[name]
    implementation, route = next(iter(specimen.routes.items()))
    model, inputs = built(specimen, implementation), inputs_of(specimen, padded=True)
    said = "".join(str(describe(model, inputs)).split())
    words = [ROUTES[route]] if route in ROUTES else []
    for sentence in (*words, *specimen.uncovered.values()):
        assert "".join(sentence.split()) in said


@EACH_ROUTE
def test_an_open_window_changes_no_gradient_and_no_random_state(name, implementation):
    assert trains_alike(name, implementation)


@pytest.mark.parametrize(
    "name",
    ["GPT-2", "Mistral (sliding window)", "BLOOM (ALiBi)", "T5 (position bias)", "BART", "ViT",
     "nn.Transformer", "nn.TransformerEncoder (length first)", "XLNet", "wav2vec 2.0"],
)  # fmt: skip
@pytest.mark.parametrize("few", [0, 1 << 20], ids=["read alone", "read together"])
def test_sampled_rows_are_what_the_model_computes_there(name, few, monkeypatch):
    monkeypatch.setattr("geomon.capture.attending.attention._FEW", few)
    monkeypatch.setattr("geomon.capture.tokens.sampling.ATTENTION_QUERIES", 8)
    specimen, verdict = ZOO[name], Verdict()
    implementation = next(iter(specimen.routes))
    reference = refer(specimen, implementation, padded=True)
    with torch.no_grad(), without_fast_path():
        model, inputs = built(specimen, implementation), inputs_of(specimen, padded=True)
        _, window = watch(model, inputs, rows=30)
    found = seen_layers(window)
    compare(specimen, reference, found, verdict, padded=True, rows=30)
    assert verdict.faults == []
    assert verdict.hidden == 0
    assert verdict.projected in (None, 0)
    assert verdict.attention < TOLERANCE
    assert all(len(seen.rows) <= 30 for seen in found.values() if seen.rows is not None)
    queries = {seen.places.shape[1] for seen in found.values() if seen.places is not None}
    assert max(queries) <= 8


# -- the table -----------------------------------------------------------------------------------

_HEAD = """# Architectures

geomon was tested on these {count} architectures. Each is a small random model, run with padding on
either side and without, and compared with what the model itself computes:

- Hidden states, and queries and keys as projected, are equal to the last bit.
- Attention probabilities, rebuilt from queries, keys, masks and biases, differ from the model's own
  eager attention by at most {worst}.
- Outputs, gradients and the random state are bit-identical with and without geomon, in eval mode
  and in train mode with dropout.

Attention is seen at a fused operator behind `scaled_dot_product_attention` (*sdpa*), or where it is
written out by hand, at the *softmax* of its scores.

`make architectures` writes this page. Models of other code bases:
[foreign_code.md](foreign_code.md).

"""
_NONE = "no attention"  # the remark on a specimen without any


def table() -> str:
    """The page, measured."""
    verdicts = {name: [measured(name, kind) for kind in ZOO[name].routes] for name in ZOO}
    whole: dict[str, list[str]] = {}
    remarked = ["", "| architecture | attention at | remarks |", "| --- | --- | --- |"]
    for name, found in verdicts.items():
        if remarks := "; ".join(_remarks(name, found)):
            remarked.append(f"| {name} | {_routes(name) or '–'} | {remarks} |")
        else:
            whole.setdefault(_routes(name), []).append(name)
    lines = [f"- **{at or _NONE}**: {', '.join(names)}." for at, names in whole.items()]
    worst = max(v.attention for found in verdicts.values() for v in found if v.attention)
    head = _HEAD.format(count=len(ZOO), worst=f"{worst:.0e}")
    return head + "\n".join([*lines, *remarked, ""])


def _routes(name: str) -> str:
    routes = (route for route in dict.fromkeys(ZOO[name].routes.values()) if route != "none")
    return ", ".join(routes)


def _remarks(name: str, verdicts: list[Verdict]) -> list[str]:
    """Collect the remarks on an architecture, over its attention implementations."""
    as_attended = ["queries and keys as attended"] if any(map(_stands_in, verdicts)) else []
    remarks = [ZOO[name].remark, *as_attended, *_reasons(verdicts)]
    return [remark for remark in dict.fromkeys(remarks) if remark not in {"", _NONE}]


def _stands_in(verdict: Verdict) -> bool:
    return any(note.endswith(AS_ATTENDED) for note in verdict.notes)


def _reasons(verdicts: list[Verdict]) -> Iterator[str]:
    """Say what is missing, except token ids of models without any; a reading's note says why."""
    kinds = {"projected_query": "projected Q and K", "visible": "attention"}
    for verdict in verdicts:
        yield from sorted(verdict.notes)
        for stack, view in verdict.missing:
            if view in kinds:
                where = f" of the {stack}" if stack else ""
                yield f"{kinds[view]}{where} missing"


def _without_differences(text: str) -> str:
    """Roundings differ from machine to machine; how large they may be is tested above."""
    return re.sub(r"\de-\d\d", "#", text)


def test_the_table_is_what_is_measured():
    assert _without_differences(TABLE.read_text()) == _without_differences(table())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    TABLE.write_text(table())
