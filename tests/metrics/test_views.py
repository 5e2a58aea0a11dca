import pytest
import torch

from geomon import geometry
from geomon.capture.snapshot import Layer
from geomon.kernels import spectrum as kernels
from geomon.kernels import spectrum_summary
from geomon.kernels.half_samples import half_samples, margin
from geomon.metrics import METRICS, MORE_METRICS, Evaluator, select
from geomon.metrics.intervals import differences_of
from geomon.metrics.views import DERIVED, LayerViews, can_be_made
from geomon.record import tags

SPECTRAL = ("anisotropy", "anisotropy_no_sinks", "effective_rank", "participation_ratio")
WIDTH = 400


@pytest.fixture
def wide(monkeypatch):
    """Rows of this width are wide: their summary is of as many vectors as at full width."""
    monkeypatch.setattr(spectrum_summary, "WHOLE_SIDE", WIDTH - 1)


def rows(count=900, massive=0):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(count, WIDTH, generator=generator) * torch.arange(1, WIDTH + 1) ** -0.4
    # At even places, so that both halves of the rows have some.
    hidden[: 2 * massive : 2] *= 200
    hidden[count - 2 * massive :: 2] *= 200
    return hidden


def views_of(hidden):
    return LayerViews(Layer(1, "block", {"hidden": hidden}))


@pytest.mark.parametrize("massive", [0, 2])
def test_values_of_wide_layers_have_an_error_and_are_within_it(massive, wide, monkeypatch):
    hidden, metrics = rows(massive=massive), select(*SPECTRAL, "alpha")
    found = geometry(hidden, metrics=metrics)
    monkeypatch.setattr(spectrum_summary, "WHOLE_SIDE", WIDTH)
    want = geometry(hidden, metrics=metrics)
    assert found.keys() - want.keys() == {f"{name}/error" for name in metrics}
    for name in metrics:
        assert abs(found[name] - want[name]) <= 2 * found[f"{name}/error"], name
        assert 0 < found[f"{name}/error"] < 0.04 * want[name], name
    assert (found["anisotropy_no_sinks"] < 0.5 * found["anisotropy"]) == (massive > 0)


def test_of_several_splits_the_error_is_that_of_one(wide):
    evaluator = Evaluator(select("effective_rank"), 2)
    layers = [Layer(index, "block", {"hidden": rows(1800)}) for index in (0, 1, 2)]
    values = evaluator.evaluate(layers, 900).values
    layer, mean = tags.layer_tag("effective_rank", 1), tags.mean_tag("effective_rank")
    parts = [
        spectrum_summary.summarise_spectrum(part).effective_rank for part in rows(1800).split(900)
    ]
    assert values[f"{layer}/error"] == pytest.approx(sum(float(part.error) for part in parts) / 2)
    assert values[f"{mean}/error"] == pytest.approx(values[f"{layer}/error"])
    assert f"{layer}/std" in values
    assert not tags.is_charted(f"{layer}/error")


def test_no_metric_of_a_wide_layer_asks_for_all_eigenvalues_but_the_one_that_needs_them(
    wide, monkeypatch
):
    asked = []

    def counted(hidden):
        asked.append(hidden.shape)
        return torch.linalg.eigvalsh(hidden.double().T.cov(correction=0)).flip(0).clamp(min=0)

    monkeypatch.setattr(kernels, "spectrum", counted)
    metrics = {
        name: metric
        for name, metric in (METRICS | MORE_METRICS).items()
        if not name.endswith("_last") and name != "twonn_gaussian"
    }
    geometry(rows(massive=2), metrics=metrics)
    assert asked == []
    null = geometry(rows(), metrics=select("twonn_gaussian"))["twonn_gaussian"]
    assert null > 5
    assert asked == [(900, WIDTH)]


def test_views_of_all_eigenvalues_are_those_also_in_wide_layers(wide):
    hidden = rows(massive=2)
    views = views_of(hidden)
    ordinary = hidden[views["ordinary_rows"]]
    assert len(ordinary) < len(hidden)
    assert torch.equal(views["spectrum"], kernels.spectrum(hidden))
    assert torch.equal(views["ordinary_spectrum"], kernels.spectrum(ordinary))
    assert not views["spectrum_summary"].is_whole


@pytest.mark.parametrize("massive", [0, 2])
def test_narrow_layers_compute_their_eigenvalues_once(massive, monkeypatch):
    counted = []
    solver = torch.linalg.eigvalsh

    def once(gram):
        if len(gram) == WIDTH:
            counted.append(gram)
        return solver(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", once)
    views = views_of(rows(massive=massive))
    found = [views[name] for name in DERIVED if "spectrum" in name or "summary" in name]
    assert len(found) == 4
    assert len(counted) == (2 if massive else 1)
    assert views["ordinary_spectrum"] is views["ordinary_summary"].eigenvalues
    assert views["spectrum"] is views["spectrum_summary"].eigenvalues


@pytest.mark.parametrize("massive", [0, 2])
def test_rows_are_multiplied_with_themselves_once(massive, monkeypatch):
    """Those without the massive ones too, and for the intervals of both."""
    multiplied = []
    product = kernels.product_with_itself

    def counted(block):
        multiplied.append(len(block))
        return product(block)

    monkeypatch.setattr(kernels, "product_with_itself", counted)
    hidden, sequences = rows(massive=massive), torch.arange(900) // 20
    views = LayerViews(Layer(1, "block", {"hidden": hidden, "sequences": sequences}))
    metrics = select("anisotropy", "anisotropy_no_sinks").values()
    found = [(views.apply(m), views.apply(differences_of(m))) for m in metrics]
    assert sum(multiplied) == len(hidden)
    for (value, differences), some in zip(
        found, (slice(None), views["ordinary_rows"]), strict=True
    ):
        want = geometry(hidden[some], sequences=sequences[some], metrics=select("anisotropy"))
        assert float(value[""]) == pytest.approx(want["anisotropy"], rel=1e-12)
        # 45 sequences make no equal groups, and some rows may be left out.
        close = pytest.approx(want["anisotropy/margin"] / half_samples(sequences[some]).widening)
        assert margin(differences[:, 0].tolist()) == close


def test_metrics_are_measured_by_the_alternative_that_is_there():
    """The sums over sequences are one way to a value; rows without sequences have it as well."""
    hidden, ids = rows(), torch.arange(len(rows())) % 7
    sequences = torch.arange(len(hidden)) // 10
    names = ("cosine", "drift_norm", "mean_square_norm", "within_variance", "within_share", "twonn")
    plain = geometry(hidden, token_ids=ids, metrics=select(*names))
    with_margins = geometry(hidden, token_ids=ids, sequences=sequences, metrics=select(*names))
    for name in names:
        assert plain[name] == pytest.approx(with_margins[name], rel=1e-9)
        assert f"{name}/margin" in with_margins.keys() - plain.keys()


def test_what_can_be_made_depends_on_what_is_there():
    assert can_be_made(["angle", "mean_query"], {"hidden", "projected_query"})
    assert not can_be_made(["angle", "row_sums"], {"hidden"})
    assert can_be_made(["last_angle"], {"last_hidden"})
    assert not can_be_made(["last_angle"], {"hidden", "last_sequences"})
    with pytest.raises(KeyError):
        can_be_made(["last_query"], {"query"})


def repeated(seed=0, *, known=True):
    """Rows of 40 sequences of 12 tokens, of which many have token id and position in common."""
    generator = torch.Generator().manual_seed(seed)
    views = {
        "hidden": torch.randn(480, 6, generator=generator),
        "token_ids": torch.randint(0, 5, (480,), generator=generator),
        "positions": torch.arange(12).repeat(40),
    }
    return views | ({"sequences": torch.arange(40).repeat_interleave(12)} if known else {})


@pytest.mark.parametrize("known", [True, False])
def test_one_row_stands_for_each_token_id_and_position_in_any_order(known):
    views = repeated(known=known)
    found = LayerViews(Layer(1, "", views))["distinct"]
    pairs = torch.stack([views["token_ids"], views["positions"]], dim=1)
    assert len(found) == len(pairs[found].unique(dim=0)) == len(pairs.unique(dim=0)) == 60
    order = torch.randperm(480, generator=torch.Generator().manual_seed(1))
    other = LayerViews(Layer(1, "", {name: view[order] for name, view in views.items()}))
    assert torch.equal(order[other["distinct"]].sort().values, found)


def test_rounding_does_not_change_which_row_stands_for_a_token_and_position():
    """By content another row stood for nearly every pair, and twonn_distinct moved by an error."""
    views = repeated()
    found = LayerViews(Layer(1, "", views))["distinct"]
    for hidden in (views["hidden"].bfloat16().float(), views["hidden"] * (1 + 1e-6)):
        again = LayerViews(Layer(1, "", views | {"hidden": hidden}))["distinct"]
        assert torch.equal(again, found)


def test_the_rows_that_stand_for_others_are_of_all_sequences():
    counts = torch.zeros(40)
    for seed in range(10):
        views = repeated(seed)
        found = LayerViews(Layer(1, "", views))["distinct"]
        counts += views["sequences"][found].bincount(minlength=40)
    # About 15 of each, with a deviation of 4 or 5: chosen by the sequence alone, one would have 60.
    assert 1 <= counts.min() <= counts.max() <= 35
