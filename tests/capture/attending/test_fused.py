"""Flex attention, and tokens that are told apart by what attention hides."""

import pytest
import torch
from fingerprint import fingerprint
from measuring import watching
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from geomon import describe, select

HEADS, WIDTH, LENGTH, SEQUENCES = 4, 32, 24, 3
METRICS = select("attention_entropy", "max_logit", "qk_cosine", "variance")
BREAK = 7  # token that ends a document

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Decoder(nn.Module):
    """Attends with a function of queries, keys, values and ids, [sequences, length, ...]."""

    def __init__(self, attend, *, packed: bool = False) -> None:
        super().__init__()
        self.packed, self.embed = packed, nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.flatten() if self.packed else ids
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, ids)
        return x


class Block(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.norm, self.attend, self.num_heads = nn.LayerNorm(WIDTH), attend, HEADS
        self.given: list[Tensor] = []
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = self.norm(x)
        self.given = [
            projection(rows).unflatten(-1, (-1, WIDTH // HEADS))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return x + self.o_proj(self.attend(*self.given, ids).flatten(-2))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.compiler.reset()


def tokens(sequences: int = SEQUENCES) -> Tensor:
    ids = torch.randint(8, 50, (sequences, LENGTH))
    ids[:, 9], ids[1, 15] = BREAK, BREAK
    return ids


def documents(ids: Tensor) -> Tensor:
    """Number of the document of each token: a break is the first of the next one."""
    return (ids == BREAK).cumsum(dim=-1)


def measured(model: nn.Module, ids: Tensor, metrics=METRICS):
    monitor, memory = watching(model, metrics=metrics, tokens=ids.numel())
    with torch.no_grad(), monitor(0):
        output = model(ids)
    monitor.close()
    return memory.readings[-1], output


def reference(attention: Block, visible: Tensor):
    """Entropy and largest score of each head, in float64; `visible` is [.., queries, keys]."""
    query, key = (x.detach().double() for x in attention.given[:2])
    if query.ndim == 3:
        query, key = query[None], key[None]
    key = key.repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(dim=-1)
    entropy = -torch.xlogy(weights, weights).sum(dim=-1).mean(dim=(0, 2))
    return entropy, scores.amax(dim=(0, 2, 3))


def agrees(reading, model: Decoder, visible: Tensor) -> None:
    for depth, block in enumerate(model.blocks, 1):
        entropy, largest = reference(block, visible)
        for head in range(HEADS):
            at = f"layer_{depth:02d}/head_{head}"
            assert reading.values[f"attention_entropy/{at}"] == pytest.approx(
                entropy[head].item(), rel=1e-5
            )
            assert reading.values[f"max_logit/{at}"] == pytest.approx(
                largest[head].item(), rel=1e-5
            )
        assert f"qk_cosine/layer_{depth:02d}/head_0" in reading.values


ORDER = torch.arange(LENGTH)
CAUSAL = ORDER[:, None] >= ORDER


# -- flex attention --------------------------------------------------------------------------------


def by_flex(q, k, v, ids, *, function=flex.flex_attention):
    """Causal within documents, or with packed tokens."""
    packed = q.ndim == 3
    q, k, v, ids = (x[None] if packed else x for x in (q, k, v, ids))
    which = documents(ids)

    def mask(b, h, i, j):
        return (i >= j) & (which[b, i] == which[b, j])

    block = flex.create_block_mask(mask, len(ids), None, q.shape[1], k.shape[1], device="cpu")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = function(q, k, v, block_mask=block, enable_gqa=True).transpose(1, 2)
    return found[0] if packed else found


def within_documents(ids: Tensor) -> Tensor:
    which = documents(ids)
    return (CAUSAL & (which[:, :, None] == which[:, None, :]))[:, None]


@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one sequence"])
def test_flex_attention_is_seen_with_its_mask(documents):
    model = Decoder(by_flex).eval()
    ids = tokens() if documents else torch.randint(8, 50, (1, LENGTH))
    with torch.no_grad():
        alone = model(ids)
    before = fingerprint(model)
    reading, output = measured(model, ids)
    assert torch.equal(output, alone)
    assert fingerprint(model) == before
    agrees(reading, model, within_documents(ids))
    assert not any("compiled" in note for note in reading.words())
    with torch.no_grad():
        assert "through torch's flex_attention" in str(describe(model, ids))


def test_packed_sequences_are_told_apart_by_what_attention_hides():
    model, ids = Decoder(by_flex, packed=True).eval(), tokens(16)
    reading, _ = measured(model, ids)
    which = documents(ids.flatten())
    order = torch.arange(len(which))
    visible = (order <= order[:, None]) & (which[:, None] == which)
    agrees(reading, model, visible)
    assert "variance/layer_01/margin" in reading.values  # from the documents


def test_an_error_in_compiled_flex_attention_leaves_nothing_behind():
    compiled = torch.compile(flex.flex_attention, backend="eager")

    def broken(q, k, v, ids):
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # no enable_gqa

    model, ids = Decoder(broken).eval(), tokens()
    before = fingerprint(model)
    with pytest.raises(Exception, match="same number of heads"):
        measured(model, ids)
    assert fingerprint(model) == before


# -- an operator of another package ----------------------------------------------------------------


LIBRARY = torch.library.Library("geomon_heads_first", "DEF")
LIBRARY.define("forward(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.impl("forward", lambda q, k, v: torch.zeros_like(q), "CPU")


def test_an_operator_with_heads_before_queries_is_refused():
    def heads_first(q, k, v, ids):
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v))
        return torch.ops.geomon_heads_first.forward(q, k, v).transpose(1, 2)

    model, ids = Decoder(heads_first).eval(), tokens()
    with torch.no_grad():
        assert "queries, but the block has" in str(describe(model, ids))


def test_tokens_in_one_row_are_told_apart_as_attention_takes_them():
    def unflattened(q, k, v, ids):
        q, k, v = (x.unflatten(0, (-1, LENGTH)).transpose(1, 2) for x in (q, k, v))
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    class Flat(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).flatten(0, 1)
            for block in self.blocks:
                x = block(x, ids)
            return x

    model, ids = Flat(unflattened).eval(), tokens(16)
    reading, _ = measured(model, ids, select("variance", "twonn_distinct", "attention_entropy"))
    assert "variance/layer_01/margin" in reading.values
    distinct = len({(int(token), place) for row in ids for place, token in enumerate(row)})
    assert reading.values["twonn_distinct/layer_00/n"] <= distinct
