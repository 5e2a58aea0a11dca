"""The figure of the recipe: profiles before and after training, and their development."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from geomon.analysis.profile import bulge, profile_of
from recipes.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    draw_seeds,
    explain_seeds,
    label_panel,
    step_axis,
)
from recipes.study.history import History, over_layers

_SHOWN = {
    "decoder": ("decoder: causal, next character", BLUE, "o"),
    "encoder": ("encoder: sees all, masked characters", ORANGE, "s"),
    "decoder_uniform": ("decoder, uniform attention weights", GREEN, "^"),
}


def draw(seeds: Mapping[str, Sequence[History]]) -> Figure:
    """Draw an experiment in four panels.

    Args:
        seeds: Records of each seed, by the kind of model.
    """
    figure = Figure(figsize=(10.2, 7.4), dpi=90, layout="constrained")
    (untrained, trained), (bulges, level) = figure.subplots(2, 2)
    steps = seeds["decoder"][0].steps
    for kind, (label, colour, marker) in _SHOWN.items():
        own, style = seeds[kind], {"colour": colour, "label": label}
        for panel, readings in (
            (untrained, [each.first for each in own]),
            (trained, [each.last for each in own]),
        ):
            profiles = [profile_of(reading, "anisotropy") for reading in readings]
            layers = range(len(profiles[0]))
            draw_seeds(panel, layers, profiles, **style, marker=marker, ms=5)
            panel.set_xticks(list(layers))
        curves = [[bulge(profile_of(r, "anisotropy")) for r in each.readings] for each in own]
        draw_seeds(bulges, steps, curves, **style)
        curves = [[over_layers(r, "anisotropy") for r in each.readings] for each in own]
        draw_seeds(level, steps, curves, **style)
    bulges.axhline(0, color=GREY, lw=1)
    level.set_ylim(bottom=0)
    top = 1.05 * max(panel.get_ylim()[1] for panel in (untrained, trained))
    depth, step = "layer (0 = what enters the first block)", "training step (logarithmic)"
    share = "anisotropy (share of variance\nalong the first direction)"
    for panel, letter, title in (
        (untrained, "a", "Anisotropy over depth, untrained"),
        (trained, "b", f"The same after {steps[-1]:,} steps"),
    ):
        panel.set_ylim(0, top)
        label_panel(panel, letter, title, depth, share)
    label_panel(bulges, "c", "Bulge of the profile", step, "(middle third - ends) / ends")
    label_panel(level, "d", "Mean over layers", step, "anisotropy")
    for panel in (bulges, level):
        step_axis(panel, steps)
    handles, labels = untrained.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=10)
    figure.supxlabel(explain_seeds(len(seeds["decoder"])), fontsize=9, color=GREY)
    return figure
