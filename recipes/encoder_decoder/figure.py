"""The figure of the experiment: profiles before and after training, and how they came about."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from geomon.analysis.profile import bulge
from recipes.encoder_decoder.claims import Runs, load_runs, mean_after_input, profile
from recipes.study.drawing import BLUE, GREEN, GREY, ORANGE, draw_seeds, explain_seeds, plain_axes

_SHOWN = {
    "decoder": ("decoder: causal, next character", BLUE, "o"),
    "encoder": ("encoder: sees all, masked characters", ORANGE, "s"),
    "decoder_uniform": ("decoder, uniform attention weights", GREEN, "^"),
}


def draw(folder: Path) -> Figure:
    """Draw an experiment in four panels.

    Args:
        folder: Folder of the experiment, with a folder for each seed.
    """
    runs = load_runs(folder)
    figure = Figure(figsize=(10.2, 7.4), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2)
    _draw_profiles(panels[0, 0], runs, 0)
    _draw_profiles(panels[0, 1], runs, -1)
    _draw_bulge(panels[1, 0], runs)
    _draw_level(panels[1, 1], runs)
    top = 1.05 * max(panel.get_ylim()[1] for panel in panels[0])
    for panel in panels[0]:
        panel.set_ylim(0, top)
    depth = "layer (0 = what enters the first block)"
    share = "anisotropy (share of variance\nalong the first direction)"
    step = "training step (logarithmic)"
    last = next(iter(runs.values()))[0][-1].step
    plain_axes(panels[0, 0], "a", "Anisotropy over depth, untrained", depth, share)
    plain_axes(panels[0, 1], "b", f"The same after {last:,} steps", depth, share)
    plain_axes(panels[1, 0], "c", "Bulge of the profile", step, "(middle third - ends) / ends")
    plain_axes(panels[1, 1], "d", "Mean over layers", step, "anisotropy")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=10)
    note = explain_seeds(len(next(iter(runs.values()))))
    figure.supxlabel(note, fontsize=9, color=GREY)
    return figure


def _draw_profiles(panel: Axes, runs: Runs, index: int) -> None:
    for name, (label, colour, marker) in _SHOWN.items():
        profiles = [profile(readings[index]) for readings in runs[name]]
        layers = range(len(profiles[0]))
        draw_seeds(panel, layers, profiles, colour=colour, label=label, marker=marker, ms=5)
    panel.set_xticks(list(layers))


def _draw_bulge(panel: Axes, runs: Runs) -> None:
    for name, (label, colour, _) in _SHOWN.items():
        curves = [[bulge(profile(each)) for each in readings] for readings in runs[name]]
        draw_seeds(panel, _steps(runs), curves, colour=colour, label=label)
    panel.axhline(0, color=GREY, lw=1)
    _step_axis(panel, _steps(runs))


def _draw_level(panel: Axes, runs: Runs) -> None:
    for name, (label, colour, _) in _SHOWN.items():
        curves = [[mean_after_input(profile(each)) for each in readings] for readings in runs[name]]
        draw_seeds(panel, _steps(runs), curves, colour=colour, label=label)
    panel.set_ylim(bottom=0)
    _step_axis(panel, _steps(runs))


def _steps(runs: Runs) -> list[int]:
    return [reading.step for reading in next(iter(runs.values()))[0]]


def _step_axis(panel: Axes, steps: list[int]) -> None:
    """Make the axis logarithmic, with step 0 to the left of the first step after it."""
    first = next((step for step in steps if step), 1)
    panel.set_xscale("symlog", linthresh=first, linscale=0.4)
    panel.set_xlim(-0.2 * first, steps[-1] * 1.1)
    shown = [0, *(first * 2**power for power in range(12) if first * 2**power <= steps[-1])]
    panel.set_xticks(shown)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
