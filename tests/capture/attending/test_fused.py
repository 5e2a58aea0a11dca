"""Fused attention: flex attention, and kernels that are registered as operators of torch."""

import functools

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


# -- operators of flash attention ----------------------------------------------------------------


def attend(q, k, v, visible):
    group = q.shape[-2] // k.shape[-2]
    q, k, v = (x.transpose(-3, -2) for x in (q, *(x.repeat_interleave(group, -2) for x in (k, v))))
    mask = visible if q.ndim == 3 else visible[:, None] if visible.ndim == 3 else visible
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(-3, -2)


LIBRARY = torch.library.Library("geomon_flash", "DEF")
LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, float dropout_p=0.0, float? softmax_scale=None, "
    "bool causal=False, int window_size_left=-1, int window_size_right=-1) -> Tensor"
)
LIBRARY.define(
    "varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "bool causal=False) -> Tensor"
)
LIBRARY.define(
    "torchs(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, "
    "bool is_causal=False) -> Tensor"
)


def _forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, left=-1, right=-1):
    """Stands for the operator of a package, which needs an accelerator."""
    visible = CAUSAL if causal else torch.ones_like(CAUSAL)
    if left >= 0:
        visible = visible & (ORDER[:, None] - left <= ORDER)
    return attend(q, k, v, visible)


def _varlen(q, k, v, ends, others, causal=False):
    order = torch.arange(len(q))
    which = torch.searchsorted(ends, order, right=True)
    visible = which == which[:, None]
    return attend(q, k, v, visible & (order <= order[:, None]) if causal else visible)


for name, function in (("forward", _forward), ("varlen_forward", _varlen), ("torchs", _varlen)):
    LIBRARY.impl(name, function, "CPU")
FLASH = torch.ops.geomon_flash


def ends_of(ids: Tensor) -> Tensor:
    """Ends of the documents among all tokens, as flash attention takes them; the last one twice."""
    breaks = (ids.flatten() == BREAK).nonzero().flatten()
    return torch.cat(
        [torch.zeros(1, dtype=torch.int64), breaks, *[torch.tensor([ids.numel()])] * 2]
    )


def by_operator(operator, q, k, v, ids):
    return operator(q, k, v, ends_of(ids), ends_of(ids), True)


def test_flash_attention_is_seen_as_an_operator():
    model = Decoder(
        lambda q, k, v, ids: FLASH.forward(
            q, k, v, causal=True, window_size_left=5, window_size_right=0
        )
    ).eval()
    ids = tokens()
    before = fingerprint(model)
    reading, _ = measured(model, ids)
    assert fingerprint(model) == before
    agrees(reading, model, (CAUSAL & (ORDER[:, None] - 5 <= ORDER)))
    assert "through a function of flash attention" in str(describe(model, ids))


def test_packed_flash_attention_is_seen_with_its_sequences():
    for operator in (FLASH.varlen_forward, FLASH.torchs):
        call = functools.partial(by_operator, operator)
        model, ids = Decoder(call, packed=True).eval(), tokens(16)
        reading, _ = measured(model, ids)
        which = (ids.flatten() == BREAK).cumsum(0)
        order = torch.arange(len(which))
        agrees(reading, model, (order <= order[:, None]) & (which[:, None] == which))
        assert "variance/layer_01/margin" in reading.values


def test_an_operator_with_heads_before_queries_is_refused():
    def heads_first(q, k, v, ids):
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v))
        mixed = HEADS_FIRST.forward(q, k, v.repeat_interleave(2, 1))
        return mixed.transpose(1, 2)

    model, ids = Decoder(heads_first).eval(), tokens()
    with torch.no_grad():
        assert "queries were attended with, of" in str(describe(model, ids))


HEADS_LIBRARY = torch.library.Library("geomon_heads_first", "DEF")
HEADS_LIBRARY.define("forward(Tensor q, Tensor k, Tensor v) -> Tensor")
HEADS_LIBRARY.impl(
    "forward",
    lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v)), CAUSAL).transpose(1, 2),
    "CPU",
)
HEADS_FIRST = torch.ops.geomon_heads_first


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
