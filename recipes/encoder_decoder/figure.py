"""The figure of the recipe: profiles before and after training, and their development."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from geomon import Reading
from geomon.analysis import bulge
from recipes.study.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    Line,
    Panel,
    draw_panels,
    explain_seeds,
    step_axis,
)
from recipes.study.history import History, hidden_states, over_layers, over_training

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
    steps = seeds["decoder"][0].steps
    depths = range(len(_profile(seeds["decoder"][0].last)))
    moments = {
        "Anisotropy over depth, untrained": lambda history: history.first,
        f"The same after {steps[-1]:,} steps": lambda history: history.last,
    }
    profiles = {
        title: [Line(words, colour, depths, [_profile(at(each)) for each in seeds[kind]],
                     {"marker": marker, "ms": 5})
                for kind, (words, colour, marker) in _SHOWN.items()]
        for title, at in moments.items()
    }  # fmt: skip
    top = max(max(map(max, line.curves)) for lines in profiles.values() for line in lines)
    curves: dict[str, tuple[str, Callable[[Reading], float]]] = {
        "Bulge of the profile": ("(middle third - ends) / ends", lambda r: bulge(_profile(r))),
        "Mean over layers": ("anisotropy", partial(over_layers, metric="anisotropy")),
    }
    return draw_panels([
        *(Panel(title, "layer (last: after the final norm)",
                "anisotropy (share of variance\nalong the first direction)", lines,
                options={"ylim": (0, 1.3 * top), "xticks": depths})
          for title, lines in profiles.items()),
        *(Panel(title, "training step (logarithmic)", unit,
                [Line(words, colour, steps, over_training(seeds[kind], measure))
                 for kind, (words, colour, _) in _SHOWN.items()],
                finish=partial(step_axis, steps=steps), legend=None)
          for title, (unit, measure) in curves.items()),
    ], 2, (10.2, 7.4), explain_seeds(len(seeds["decoder"])))  # fmt: skip


def _profile(reading: Reading) -> list[float]:
    return hidden_states(reading, "anisotropy")
