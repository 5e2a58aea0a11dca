import pytest
import torch
from torch import nn

from geomon.capture.anatomy.projections import Sizes, find_projections
from geomon.capture.attending.qkv import (
    Evidence,
    UndecidedError,
    copy_multihead_weights,
    project_multihead,
    split_fused,
    split_latent,
    split_separate,
)

ROWS, HEADS, WIDTH = 40, 4, 8


def contiguous(q, k, v):
    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)


def by_key_head(q, k, v):
    groups = q.unflatten(1, (k.shape[1], -1))
    return torch.cat([groups, k[:, :, None], v[:, :, None]], dim=2).flatten(1)


def in_quarters(q, k, v):
    quarters = [x.unflatten(1, (4, -1)).flatten(2) for x in (q, v, k)]
    return torch.cat(quarters, dim=2).flatten(1)


LAYOUTS = [
    (contiguous, 4), (contiguous, 2), (contiguous, 1), (by_key_head, 4), (by_key_head, 2),
    (by_key_head, 1), (in_quarters, 4),
]  # fmt: skip


def made(key_heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, h, WIDTH, generator=generator) for h in (HEADS, key_heads, key_heads)]


def rotated(rows):
    """Every row turned by angles of its own: norms stay."""
    turns = torch.linalg.qr(torch.randn(len(rows), WIDTH, WIDTH)).Q
    return torch.einsum("nhw,nwv->nhv", rows, turns)


@pytest.mark.parametrize("repeated", [False, True], ids=["", "keys repeated"])
@pytest.mark.parametrize(("layout", "key_heads"), LAYOUTS)
def test_the_layout_is_told_by_what_was_attended(layout, key_heads, repeated):
    q, k, v = made(key_heads)
    key = k.repeat_interleave(HEADS // key_heads, dim=1) if repeated else k
    seen = Evidence(
        rotated(q).norm(dim=-1) * 0.3,
        rotated(key).norm(dim=-1),
        None,
        torch.arange(ROWS)[:, None].expand(-1, 2),
    )
    output = layout(q, k, v)
    query, keys = split_fused(output[:7], output, seen, Sizes(HEADS, None, WIDTH))
    assert torch.equal(query, q[:7])
    assert torch.equal(keys, k[:7])


@pytest.mark.parametrize("slope", [0.0, -3.0], ids=["", "ALiBi"])
@pytest.mark.parametrize(("layout", "key_heads"), LAYOUTS)
def test_the_layout_is_told_by_scores_where_attention_is_by_hand(layout, key_heads, slope):
    q, k, v = made(key_heads)
    places = torch.arange(ROWS)
    scores = (q * k.repeat_interleave(HEADS // key_heads, dim=1)).sum(dim=-1) * 0.35
    scores = scores + slope * places[:, None] * torch.arange(1, 5)
    scores[3:6] = torch.nan  # masked
    output = layout(q, k, v)
    places = places[:, None].expand(-1, 2)
    query, keys = split_fused(
        output, output, Evidence(None, None, scores, places), Sizes(HEADS, None, WIDTH)
    )
    assert torch.equal(query, q)
    assert torch.equal(keys, k)


def test_what_cannot_be_told_is_refused_with_its_reason():
    q, k, v = made(4)
    output, places = contiguous(q, k, v), torch.arange(ROWS)
    sizes = Sizes(HEADS, None, WIDTH)
    other = Evidence(*(torch.rand(ROWS, HEADS) + 0.5 for _ in range(2)), None, places)
    true = Evidence(q.norm(dim=-1), k.norm(dim=-1), None, places)
    for sample, evidence, why in (
        (output, other, "none of the known layouts agrees"),
        (None, None, "nothing was seen as attended"),
        (output[:4], Evidence(true.query[:4], true.key[:4], None, places[:4]), "nothing was seen"),
    ):
        with pytest.raises(UndecidedError, match=why):
            split_fused(output, sample, evidence, sizes)
    alike = torch.ones(ROWS, 96)
    flat = Evidence(*(torch.full((ROWS, HEADS), WIDTH**0.5) for _ in range(2)), None, places)
    query, _ = split_fused(alike, alike, flat, sizes)  # whichever it is, the rows are the same
    assert bool((query == 1).all())
    with pytest.raises(UndecidedError, match="cannot be shared out among 5 heads"):
        split_fused(output, output, true, Sizes(5, None, WIDTH))
    with pytest.raises(UndecidedError, match="among unknown heads"):
        split_fused(output, output, true, Sizes(None, None, None))


def test_one_key_head_needs_no_evidence():
    q, k, v = made(1)
    query, key = split_fused(contiguous(q, k, v), None, None, Sizes(HEADS, None, WIDTH))
    assert torch.equal(query, q)
    assert torch.equal(key, k)


def test_separate_rows_by_head():
    rows, keys = torch.randn(5, 24), torch.randn(5, 16)
    query, key = split_separate(rows, keys, Sizes(3, None, 8))
    assert torch.equal(query, rows.unflatten(1, (3, 8)))
    assert torch.equal(key, keys.unflatten(1, (2, 8)))
    query, key = split_separate(rows, keys, Sizes(3, None, None), halves=True)
    assert torch.equal(query, rows.unflatten(1, (3, 8)))
    assert torch.equal(key, keys[:, None, :8])
    with pytest.raises(UndecidedError, match="24 and 16 wide do not make 2 heads of width 8"):
        split_separate(rows, keys, Sizes(2, None, 8))
    with pytest.raises(UndecidedError, match="number of heads is not known"):
        split_separate(rows, keys, Sizes(None, None, 8))


@pytest.mark.parametrize("kwargs", [{}, {"kdim": 12, "vdim": 12}, {"bias": False}])
def test_multihead_attention_is_projected_from_its_inputs(kwargs):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True, **kwargs)
    assert find_projections(module).kind == "multihead"
    query, memory = torch.randn(1, 3, 16), torch.randn(1, 5, kwargs.get("kdim", 16))
    _, expected = module(query, memory, memory, average_attn_weights=False)
    weights = copy_multihead_weights(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    q, k = project_multihead(weights, query[0], memory[0])
    scores = torch.einsum("qhd,khd->hqk", q, k) / 2
    assert torch.allclose(scores.softmax(dim=-1), expected[0], atol=1e-6)


# -- a gate beside the queries -------------------------------------------------------------------

GATED = {
    "[q | gate] of each head": lambda q, g: torch.cat([q, g], dim=-1).flatten(1),
    "[gate | q] of each head": lambda q, g: torch.cat([g, q], dim=-1).flatten(1),
    "queries first": lambda q, g: torch.cat([q.flatten(1), g.flatten(1)], dim=1),
    "gates first": lambda q, g: torch.cat([g.flatten(1), q.flatten(1)], dim=1),
}


def rotary(rows, turned, neighbours):
    """Rows turned by their position: the first dimensions in pairs, the others not."""
    half = turned // 2
    pairs = torch.arange(half)
    some, others = (2 * pairs, 2 * pairs + 1) if neighbours else (pairs, pairs + half)
    angles = torch.arange(len(rows))[:, None, None] * 10.0**-pairs
    result = rows.clone()
    result[..., some] = rows[..., some] * angles.cos() - rows[..., others] * angles.sin()
    result[..., others] = rows[..., others] * angles.cos() + rows[..., some] * angles.sin()
    return result


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("turned", "neighbours"), [(8, False), (8, True), (4, False), (2, True)])
@pytest.mark.parametrize("layout", GATED)
def test_queries_are_told_from_gates(layout, turned, neighbours, normalised):
    generator = torch.Generator().manual_seed(3)
    query, gate = (torch.randn(64, HEADS, WIDTH, generator=generator) for _ in range(2))
    key = torch.randn(64, 2 * WIDTH, generator=generator)
    seen = query
    if normalised:
        weight = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
        seen = nn.functional.rms_norm(query, (WIDTH,)) * weight
    seen = rotary(seen, turned, neighbours)
    evidence = Evidence(seen.norm(dim=-1), None, None, torch.arange(64), seen)
    output = GATED[layout](query, gate)
    found, keys = split_separate(
        output[:9], key[:9], Sizes(HEADS, None, WIDTH), sample=output, evidence=evidence
    )
    assert torch.equal(found, query[:9])
    assert torch.equal(keys, key[:9].unflatten(1, (2, WIDTH)))


def test_a_gate_that_nothing_shows_is_refused():
    output, key = torch.randn(64, 2 * HEADS * WIDTH), torch.randn(64, 2 * WIDTH)
    other = torch.randn(64, HEADS, WIDTH)
    evidence = Evidence(other.norm(dim=-1), None, None, torch.arange(64), other)
    for sample, given in ((None, None), (output[:4], evidence), (output, evidence)):
        with pytest.raises(UndecidedError, match=r"query and gate|queries and gates"):
            split_separate(output, key, Sizes(HEADS, None, WIDTH), sample=sample, evidence=given)


# -- latent attention ----------------------------------------------------------------------------

LATENT, COMMON, OWN = 6, 4, 5


def latent_parts():
    generator = torch.Generator().manual_seed(5)

    def normal(*sizes):
        return torch.randn(ROWS, *sizes, generator=generator)

    query, own, values = normal(HEADS, OWN + COMMON), normal(HEADS, OWN), normal(HEADS, 7)
    key = torch.cat([own, (common := normal(COMMON))[:, None].expand(-1, HEADS, -1)], dim=-1)
    return query, own, values, normal(LATENT), common, key


def norms(query, key):
    return Evidence(2 * query.norm(dim=-1), key.norm(dim=-1), None, torch.arange(ROWS))


@pytest.mark.parametrize("latent_first", [True, False])
@pytest.mark.parametrize("own_first", [True, False])
def test_latent_keys_are_of_two_parts(own_first, latent_first):
    query, own, values, latent, common, key = latent_parts()
    outputs = [
        query.flatten(1),
        torch.cat([own, values] if own_first else [values, own], dim=-1).flatten(1),
        torch.cat([latent, common] if latent_first else [common, latent], dim=-1),
    ]
    sizes = Sizes(HEADS, None, OWN + COMMON)
    few = [rows[:9] for rows in outputs]
    found, keys = split_latent(few, outputs, norms(query, key), sizes, LATENT)
    assert torch.equal(found, query[:9])
    assert torch.equal(keys, key[:9])


def test_latent_keys_that_do_not_agree_are_refused():
    query, own, values, latent, common, key = latent_parts()
    outputs = [query.flatten(1), torch.cat([own, values], dim=-1).flatten(1),
               torch.cat([latent, common], dim=-1)]  # fmt: skip
    sizes, other = Sizes(HEADS, None, OWN + COMMON), torch.randn_like(query)
    for evidence in (norms(other, key), norms(query, other)):
        with pytest.raises(UndecidedError, match="do not agree with what was attended"):
            split_latent(outputs, outputs, evidence, sizes, LATENT)
    for wrong, latent_width in ((Sizes(HEADS, None, 50), LATENT), (sizes, LATENT + 5)):
        with pytest.raises(UndecidedError, match="do not make 4 heads"):
            split_latent(outputs, outputs, norms(query, key), wrong, latent_width)
    for wrong, latent_width in ((Sizes(None, None, None), LATENT), (sizes, None)):
        with pytest.raises(UndecidedError, match="is not known"):
            split_latent(outputs, outputs, norms(query, key), wrong, latent_width)
