import pytest
import torch

from geomon.metrics import select
from support.kernels import group_sequences, nearest, product_with_itself, spectrum
from support.measuring import Layer, LayerViews, spread_rows

WIDTH = 40
SEQUENCES = torch.arange(900) // 20


def rows(count=900, massive=0):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(count, WIDTH, generator=generator) * torch.arange(1, WIDTH + 1) ** -0.4
    hidden[: 2 * massive : 2] *= 200
    return hidden


def views_of(hidden, **captured):
    return LayerViews(Layer(1, "block", {"hidden": hidden, **captured}))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("massive", [0, 2])
def test_eigenvalues_of_all_rows_and_of_ordinary_ones_are_computed_once(
    massive, known, monkeypatch
):
    multiplied = []

    def counted(block):
        multiplied.append(len(block))
        return product_with_itself(block)

    monkeypatch.setattr("geomon.kernels.spectrum.product_with_itself", counted)
    hidden = rows(massive=massive)
    views = views_of(hidden, **({"sequences": SEQUENCES} if known else {}))
    found = [views[name] for name in ("spectrum", "ordinary_spectrum", "axes", "ordinary_axes")]
    names = ("anisotropy", "anisotropy_without_massive", "effective_rank", "alpha")
    for metric in select(*names).values():
        views.apply(metric)
    ordinary, groups = hidden[views["ordinary_rows"]], views["groups"].size
    assert (len(ordinary), groups) == (900 - massive, 8 if known else 1)
    assert found[2].squares.shape == (groups, WIDTH)
    assert sum(multiplied) == 900 + (900 - massive if massive else 0)
    expected = [spectrum(hidden), spectrum(ordinary)]
    torch.testing.assert_close(found[:2], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("known", [True, False])
def test_spectra_of_wide_layers_stand_on_some_of_the_rows(known, monkeypatch):
    monkeypatch.setattr("geomon.metrics.views.SPECTRAL_ROWS", 300)
    hidden, captured = rows(massive=2), {"sequences": SEQUENCES} if known else {}
    whole = views_of(hidden, **captured)["spectrum"]
    torch.testing.assert_close(whole, spectrum(hidden), rtol=1e-9, atol=1e-9)
    monkeypatch.setattr("geomon.metrics.views.SPECTRAL_WIDTH", WIDTH - 1)
    views = views_of(hidden, **captured)
    some = spread_rows(torch.arange(900), 300)
    ordinary = spread_rows(views["ordinary_rows"].nonzero().squeeze(1), 300)
    for name, chosen in (("spectrum", some), ("ordinary_spectrum", ordinary)):
        torch.testing.assert_close(views[name], spectrum(hidden[chosen]), rtol=1e-9, atol=0)
    if known:
        counts = group_sequences(SEQUENCES)[some].bincount().double()
        assert torch.equal(views["axes"].counts, counts)


def test_rows_that_are_chosen_are_evenly_spread_and_mostly_the_same_of_like_sets():
    every = torch.arange(5000)
    some = spread_rows(every, 512)
    assert len(some) == len(some.unique()) == 512
    assert torch.equal(some.sort().values, some)
    counts = (some // 500).bincount(minlength=10)
    assert 45 <= counts.min() <= counts.max() <= 58
    less = every[torch.randperm(5000, generator=torch.Generator().manual_seed(0)) >= 250]
    assert torch.isin(spread_rows(less, 512), some).sum() > 0.9 * 512
    assert torch.equal(spread_rows(every, None), every)
    assert torch.equal(spread_rows(every[:5], 5), every[:5])


@pytest.mark.parametrize("change", [lambda x: x.bfloat16().float(), lambda x: x * (1 + 1e-6)])
def test_rounding_does_not_change_which_row_stands_for_a_token_and_position(change):
    """By content another row stood for nearly every pair, and twonn_distinct moved by an error."""
    hidden, few = rows(480), torch.Generator().manual_seed(0)
    tokens = {
        "token_ids": torch.randint(0, 5, (480,), generator=few),
        "positions": torch.arange(12).repeat(40), "sequences": torch.arange(480) // 12,
    }  # fmt: skip
    first, second = (views_of(x, **tokens)["distinct"] for x in (hidden, change(hidden)))
    assert torch.equal(first, second)


@pytest.mark.parametrize("queries", [100, 500, None])
def test_lists_that_are_known_in_part_are_those_of_a_search(queries):
    hidden = rows()
    hidden[100:200] = hidden[300:400]  # copies, and near-duplicates of one pair
    hidden[500:600] = hidden[500] + 1e-4 * hidden[500:600]
    ids, positions = torch.arange(900) % 7, torch.arange(900) % 100 // 2
    ids[500:600], positions[500:600] = 1, 2
    layer = Layer(1, "block", {"hidden": hidden, "token_ids": ids, "positions": positions})
    views = LayerViews(layer, given={"queries": queries})
    near = nearest(hidden, 24, of=views["query_rows"], among=views["unique_rows"])
    assert all(map(torch.equal, views["nearest"], near))
    own, distinct = views["distinct_rows"], views["distinct"]
    two = nearest(hidden, 2, of=own, among=distinct)
    assert torch.equal(views["distinct_neighbours"], two.distances)
    assert not torch.isin(distinct, views["unique_rows"]).all()  # a copy stands for its pair
