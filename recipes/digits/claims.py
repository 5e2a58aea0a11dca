"""What Godey et al. (2401.12143) found on text and on large vision models, on images of digits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from geomon.kernels.baselines import isotropic_cosine_magnitude
from recipes.digits.findings import Training, mean_over
from recipes.digits.model import CONVOLUTIONAL, MIXER, TRANSFORMER
from recipes.study import Claim

COMMAND = "make digits"
PICTURE = "docs/pictures/digits.png"
# The convolutional network, with one row for each image in place of one for each place.
PER_IMAGE = "convolutional_per_image"

_BAR = (
    "largest mean cosine over layers, over the 95th percentile of a pair of isotropic vectors of "
    "that width"
)
_SIGNIFICANT = 0.05


def claims(
    trainings: Mapping[str, Sequence[Training]], *, head_width: int, differs: str, seconds: float
) -> list[Claim]:
    """Compare what is published with the records.

    Args:
        trainings: Trainings by the name of their network, and `PER_IMAGE`.
        head_width: Width of a head of the transformer.
        differs: In which way the networks differ from the published ones.
        seconds: Time of the command on two cores.
    """
    same = {"command": COMMAND, "picture": PICTURE, "differs": differs, "seconds": seconds}
    return [
        *_anisotropy(trainings, same),
        *_drift(trainings, same),
        *_attention(trainings[TRANSFORMER], head_width, same),
    ]


def _anisotropy(
    trainings: Mapping[str, Sequence[Training]], same: Mapping[str, Any]
) -> list[Claim]:
    def values(kind: str) -> tuple[float, ...]:
        return tuple(each.anisotropy() for each in trainings[kind])

    published = "most convolutional networks are isotropic; ResNet-50 is not in its first layers"
    return [
        Claim(
            name="vision_transformer_anisotropic",
            asserts="A vision transformer is anisotropic at some layer.",
            published="almost every one is; MiT is not, and ViT has a low cosine at all layers",
            source="2401.12143, section 3.2, figure 3b",
            quantity=_BAR, values=values(TRANSFORMER), above=1.0, **same,
        ),
        Claim(
            name="convolutional_network_isotropic",
            asserts="A convolutional network is isotropic at every layer, a row for each image.",
            published=published,
            source="2401.12143, section 3.2, figure 4",
            quantity=_BAR, values=values(PER_IMAGE), below=1.0, **same,
        ),
        Claim(
            name="convolutional_places_isotropic",
            asserts="A convolutional network is isotropic at every layer, a row for each place.",
            published=f"with a row for each image: {published}",
            source="2401.12143, section 3.2, figure 4",
            quantity=_BAR, values=values(CONVOLUTIONAL), below=1.0, **same,
        ),
        Claim(
            name="convolutional_isotropy_grows_with_depth",
            asserts="A convolutional network is more isotropic in its last layer than at first.",
            published="ResNet-50 becomes more and more isotropic in deeper layers",
            source="2401.12143, section 3.2, figure 4",
            quantity="mean cosine at the last layer less that at the first, a row for each image",
            values=tuple(
                each.profile("cosine")[-1] - each.profile("cosine")[0]
                for each in trainings[PER_IMAGE]
            ),
            below=0.0, **same,
        ),
        Claim(
            name="mixer_isotropic",
            asserts="A network of perceptrons, without attention, is isotropic at every layer.",
            published="implied, where anisotropy is inherent to self-attention; none was shown",
            source="2401.12143, title",
            quantity=_BAR, values=values(MIXER), below=1.0, **same,
        ),
    ]  # fmt: skip


def _drift(trainings: Mapping[str, Sequence[Training]], same: Mapping[str, Any]) -> list[Claim]:
    def p_values(kind: str) -> tuple[float, ...]:
        return tuple(each.drift_correlation()[1] for each in trainings[kind])

    quantity = "exact p-value of the Spearman correlation over layers of drift norm and mean cosine"
    return [
        Claim(
            name="vision_transformer_drift_explains_cosine",
            asserts="Over the layers of a vision transformer, drift and cosine are correlated.",
            published="p < 0.05 for transformers of the modality",
            source="2401.12143, section 3.3, figure 5",
            quantity=quantity, values=p_values(TRANSFORMER), below=_SIGNIFICANT, **same,
        ),
        Claim(
            name="convolutional_drift_does_not_explain_cosine",
            asserts="Over the layers of a convolutional network, they are not correlated.",
            published="p > 0.05 for most convolutional networks",
            source="2401.12143, section 3.3, figure 5",
            quantity=quantity, values=p_values(PER_IMAGE), above=_SIGNIFICANT, **same,
        ),
    ]  # fmt: skip


def _attention(
    trainings: Sequence[Training], head_width: int, same: Mapping[str, Any]
) -> list[Claim]:
    cosines = [list(each.layers("qk_cosine").values()) for each in trainings]
    entropies = [list(each.layers("attention_entropy").values()) for each in trainings]
    chance = isotropic_cosine_magnitude(head_width)
    aligned, sharp = "2401.12143, section 5, figure 13", "2401.12143, section 5, figure 15"
    return [
        Claim(
            name="vision_mean_query_and_key_align",
            asserts="Mean queries and mean keys align, in common or opposite directions.",
            published="almost all heads of MultiBERT align along training",
            source=aligned,
            quantity="mean over heads of |cos(mean query, mean key)| at the end, over that of two "
            "random directions",
            values=tuple(each.alignment()[-1] / chance for each in trainings),
            above=1.0, **same,
        ),
        Claim(
            name="vision_alignment_grows",
            asserts="The alignment of mean queries and mean keys grows along training.",
            published="the cosines of MultiBERT's heads move away from 0",
            source=aligned,
            quantity="mean over heads of |cos(mean query, mean key)|, end less start",
            values=tuple(each.alignment()[-1] - each.alignment()[0] for each in trainings),
            above=0.0, **same,
        ),
        Claim(
            name="vision_first_layers_common_direction",
            asserts="In the first layers mean query and mean key have a common direction.",
            published="positive cosine in the first layers of MultiBERT",
            source=aligned,
            quantity="mean of cos(mean query, mean key) over the heads of the first two layers",
            values=tuple(mean_over(layers[:2])[-1] for layers in cosines),
            above=0.0, **same,
        ),
        Claim(
            name="vision_last_layers_opposite_direction",
            asserts="In the last layers mean query and mean key have opposite directions.",
            published="negative cosine in the last layers of MultiBERT",
            source=aligned,
            quantity="mean of cos(mean query, mean key) over the heads of the last two layers",
            values=tuple(mean_over(layers[-2:])[-1] for layers in cosines),
            below=0.0, **same,
        ),
        Claim(
            name="vision_entropy_decays_at_every_layer",
            asserts="The entropy of attention decays along training at every layer.",
            published="an overall decay for all layers of MultiBERT",
            source=sharp,
            quantity="largest change of the entropy over layers, end less start, in nats",
            values=tuple(max(curve[-1] - curve[0] for curve in layers) for layers in entropies),
            below=0.0, **same,
        ),
        Claim(
            name="vision_first_layers_sharper",
            asserts="Attention stays sharper in the first layers than in the last.",
            published="lower entropy in the first layers of MultiBERT",
            source=sharp,
            quantity="entropy at the end, mean of the first two layers less mean of the last two",
            values=tuple(
                math.fsum((mean_over(layers[:2])[-1], -mean_over(layers[-2:])[-1]))
                for layers in entropies
            ),
            below=0.0, **same,
        ),
    ]  # fmt: skip
