"""A window keeps some rows, queries and sequences, and knows the dimension of the width."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from geomon.capture import ATTENTION_QUERIES
from support.models import PlainDecoder, batch
from support.referee import sampled
from support.watched import blocks_of, check_hidden, look, notes


# Each row has the input of the first of 3 blocks, and the output, query and key of each block.
@pytest.mark.parametrize(
    ("views", "options", "kept"),
    [
        ({"hidden"}, {}, 4),
        ({"hidden"}, {"extra_layers": ("final_norm",)}, 5),
        ({"hidden", "last_hidden"}, {}, 8),
        ({"hidden", "query"}, {}, 16),
        ({"hidden", "projected_query"}, {}, 16),
    ],
)
def test_a_limit_of_memory_counts_all_that_is_kept_of_a_row(views, options, kept):
    options = {"views": views, "max_mb": 0.5, **options}
    info = look(PlainDecoder(), batch(64, 32), rows=10**6, options=options).snapshot().info
    assert info.tokens == int(0.25e6 / (4 * 32 * kept))


LIMITS = [(1e-6, 16), (0.1, None), (100.0, 1024), (None, 1024)]


@pytest.mark.parametrize(("limit", "tokens"), LIMITS)
def test_memory_is_held_by_keeping_fewer_rows_and_said(limit, tokens):
    seen = look(PlainDecoder(), batch(64, 16), rows=1024, options={"max_mb": limit})
    snapshot = seen.snapshot()
    assert snapshot.info.tokens == (tokens or snapshot.info.tokens)
    names = ("hidden", "projected_query", "projected_key", "query", "key")
    views = [x.captured[name] for x in snapshot.layers for name in names if name in x.captured]
    held = sum(view.numel() for view in views) * 4e-6
    assert tokens or 0.25 * limit < held <= limit
    assert "query" in snapshot.layers[1].captured  # attention is seen with fewer rows, too
    said = f"at most {snapshot.info.tokens} rows instead of 1024 are kept: a window may hold "
    assert [text[: len(said)] for text in notes(seen)] == (
        [said] if snapshot.info.tokens < 1024 else []
    )


def test_only_the_kept_rows_stay_in_memory():
    seen = look(PlainDecoder(width=256, layers=2), batch(64, 64), rows=8)
    for layer in seen.snapshot().layers:
        kept = [layer.captured[view].untyped_storage() for view in ("hidden", "last_hidden")]
        held = {storage.data_ptr(): storage.nbytes() for storage in kept}
        assert sum(held.values()) == (8 + 8) * 256 * 4


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_the_same_at_every_layer_and_by_seed_alone(padded):
    model, ids, state = PlainDecoder().eval(), batch(), torch.random.get_rng_state()
    hides = {"attention_mask": torch.arange(32).expand(8, 32) % 3 > 0} if padded else {}
    model.forward, forward = (lambda ids, attention_mask=None: forward(ids)), model.forward
    rows = []
    for seed in (1, 1, 2):
        seen = look(model, ids, rows=40, options={"seed": seed}, **hides)
        rows.append([sampled(seen, "", layer.index).rows for layer in seen.snapshot().layers])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(each, rows[0][0]) for each in [*rows[0], *rows[1]])
    assert not torch.equal(rows[2][0], rows[0][0])
    assert len(set(rows[0][0].tolist())) == 40
    assert not padded or (rows[0][0] % 32 % 3 > 0).all()


def test_a_seed_keeps_the_rows_that_it_kept_in_earlier_versions():
    """A run that another version of geomon resumes has one course, and no jump."""
    seen = look(PlainDecoder(), batch(40, 8), rows=80, options={"seed": 3})
    chosen = sampled(seen, "", 1)
    assert chosen.rows[:6].tolist() == [275, 307, 203, 311, 43, 100]
    assert chosen.sequences.tolist() == [4, 6, 13, 16, 18, 23, 26, 30, 33, 35]


def attend(q, k, v):
    return scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("sequences", "length", "shifts"),
    [
        (ATTENTION_QUERIES // 4, 256, ATTENTION_QUERIES // 32),
        (16, ATTENTION_QUERIES, 2),
        (8, ATTENTION_QUERIES, 1),
        (3, 10, 1),
    ],
)
def test_each_eighth_of_the_sequences_asks_at_the_same_positions(sequences, length, shifts):
    seen = look(blocks_of(attend, 4, heads=1), torch.randn(sequences, length, 4))
    chosen = sampled(seen, "", 1)
    assert chosen.sequences.tolist() == list(range(sequences))
    assert chosen.places.shape == (sequences, min(length, ATTENTION_QUERIES // sequences))
    assert len(torch.unique(chosen.places, dim=0)) == shifts
    for first in range(0, sequences - shifts + 1, shifts):  # together they ask at even distances
        asked = chosen.places[first : first + shifts].flatten().sort().values
        assert torch.equal(asked, (2 * torch.arange(len(asked)) + 1) * length // (2 * len(asked)))


def test_queries_and_keys_are_of_some_sequences_if_not_all_rows_fit():
    """Each by itself, where nothing rotates: two errors that agree would still attend."""
    model, x, found = blocks_of(attend), torch.randn(50, 40, 32), []
    for rows, seed in ((400, 3), (400, 3), (400, 4), (160, 3), (120, 3), (20, 0)):
        seen = look(model, x, rows=rows, options={"seed": seed})
        chosen, views = sampled(seen, "", 2), seen.snapshot().layers[2].captured
        own, found = model[1].attention, [*found, chosen.sequences.tolist()]
        assert torch.equal(views["query"], own.query[chosen.sequences])
        assert torch.equal(views["key"], own.key[chosen.sequences])
        projected = own.query.transpose(1, 2).flatten(0, 1)[chosen.query_rows]
        assert torch.equal(views["projected_query"], projected)
        assert len(chosen.query_rows) == rows
    assert found[0] == found[1] == sorted(set(found[0])) != found[2]
    # Intervals need 8: up to so many, keys may be twice as many as rows.
    assert [len(each) for each in found] == [10, 10, 10, 8, 6, 1]


def conv(kind, width):
    return kind(width, width, 3, padding=1)


@pytest.mark.parametrize(
    ("shape", "parts", "moved"),
    [
        ((2, 8, 5, 5), [conv(nn.Conv2d, 8)], True),
        ((2, 8, 8, 8), [conv(nn.Conv2d, 8), nn.Linear(8, 8)], True),
        ((2, 8, 7), [conv(nn.Conv1d, 8)], True),
        ((2, 5, 5, 8), [nn.Linear(8, 8)], False),
        ((2, 7, 8), [conv(nn.Conv1d, 7), nn.LayerNorm(8)], False),
        ((2, 7, 8), [nn.Linear(8, 8)], False),
        ((7, 8), [conv(nn.Conv1d, 7)], False),
    ],
)
def test_the_width_is_found_among_the_dimensions(shape, parts, moved):
    model, x = nn.Sequential(nn.Sequential(*parts), nn.Sequential(*parts)), torch.randn(shape)
    seen = look(model, x)
    for depth, state in enumerate([x, model[0](x), model(x)]):
        check_hidden(seen, depth, state.movedim(1, -1) if moved else state)


def test_each_container_has_a_width_of_its_own():
    kinds = [conv(nn.Conv1d, 8), nn.Linear(7, 7)] * 2
    model, x = (
        nn.Sequential(*(nn.Sequential(kind, nn.GELU()) for kind in kinds)),
        torch.randn(2, 8, 7),
    )
    seen = look(model, x)
    for depth, block in enumerate(model, 1):
        x = block(x)
        check_hidden(seen, depth, x.movedim(1, -1) if depth % 2 else x)
