import pytest
import torch
from scipy import stats

from geomon.kernels.dimension import twonn
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import anisotropy, spectrum
from geomon.metrics.across_layers import across_layers, nulls
from geomon.metrics.table import METRICS, select


def profile(metric, numbers):
    return {f"{metric}/layer_{layer:02d}": value for layer, value in enumerate(numbers)}


def test_drift_and_cosine_are_correlated_over_layers():
    drift, cosine = [1.0, 2.0, 4.0, 9.0, 7.0], [0.1, 0.3, 0.2, 0.8, 0.9]
    found = across_layers(profile("drift_norm", drift) | profile("cosine", cosine))
    assert found["drift_cosine/pearson"] == pytest.approx(stats.pearsonr(drift, cosine).statistic)
    assert found["drift_cosine/spearman"] == pytest.approx(stats.spearmanr(drift, cosine).statistic)
    assert found["drift_cosine/spearman_p"] == pytest.approx(stats.spearmanr(drift, cosine).pvalue)


def test_a_bell_has_its_peak_in_the_middle_and_a_bulge():
    found = across_layers(profile("anisotropy", [0.1, 0.4, 0.8, 0.4, 0.1]))
    assert found["anisotropy_profile/peak_depth"] == 0.5
    assert found["anisotropy_profile/bulge"] > 1
    rising = across_layers(profile("anisotropy", [0.1, 0.2, 0.3, 0.4, 0.5]))
    assert rising["anisotropy_profile/peak_depth"] == 1
    assert rising["anisotropy_profile/bulge"] == pytest.approx(0)


def test_few_layers_say_nothing_across():
    assert across_layers(profile("anisotropy", [0.1, 0.4, 0.8])) == {}
    assert across_layers({}) == {}


def test_nulls_are_what_noise_gives():
    found = nulls(METRICS, 1000, 32)
    noise = torch.randn(1000, 32, generator=torch.Generator().manual_seed(5))
    assert found["anisotropy/null"] == pytest.approx(anisotropy(spectrum(noise)).item(), rel=0.05)
    assert 0.2 < found["cosine/null"] < 0.35  # 1.645 / sqrt(32) = 0.29
    assert 15 < found["twonn/null"] < 32
    assert nulls(select("variance"), 1000, 32) == {}
    assert nulls(METRICS, 2, 32) == {}


@pytest.mark.parametrize("rows", [4095, 4097, 5000, 9000])
def test_the_null_of_many_rows_is_that_of_some_of_them_among_all(rows):
    generator = torch.Generator().manual_seed(0)
    first = min(rows, 4096)
    noise = [torch.randn(first, 12, generator=generator)]
    while (missing := rows - sum(map(len, noise))) > 0:
        noise.append(torch.randn(min(missing, 256), 12, generator=generator))
    near = nearest(torch.cat(noise), k=2, of=torch.arange(first)).distances
    found = nulls(select("twonn"), rows, 12)["twonn/null"]
    assert found == pytest.approx(twonn(near).item(), rel=1e-9)
