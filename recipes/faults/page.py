"""The odds as a page of Markdown and a picture: every number is computed from the records."""

import textwrap
from collections.abc import Iterable, Sequence
from statistics import median, quantiles

from matplotlib.figure import Figure

from recipes.faults.detectors import (
    DETECTORS,
    Outcome,
    Rate,
    Result,
    Run,
    evaluate,
    evaluate_alerts,
)
from recipes.faults.kinds import FAULTS
from recipes.faults.training import AFTER, BATCHES, EACH_STEP
from recipes.study.drawing import BLUE, ORANGE
from recipes.study.markdown import table

KINDS = {
    kind: [name for name, fault in FAULTS.items() if fault.kind == kind]
    for kind in ("loud", "silent", "creeping")
}
# Numbers that are compared with alerts, with their colours and widths: where lines lie over one
# another, the wide ones below are still seen.
_DRAWN = {"loss": ("#B8B8B8", 6.0), "gradient norm": (ORANGE, 3.2), "alerts": (BLUE, 1.8)}
_STRICT, _LOOSE = 1e-4, 1e-3
_SOON = 50  # steps
_HEAD = f"""# Warnings and their odds

Would you have known before the loss? We put faults into healthy trainings of small decoders: *loud*
ones, which we expected to show in the loss at once, *silent* ones, to be absorbed by it, and
*creeping* ones, to grow. Faults marked with * were not looked at while alerts were chosen. *Steps*
are median and quartiles. `make faults` makes the trainings and writes these tables.

Each quantity got one threshold, set on healthy runs so that loss and gradient norm raise one false
alarm in {1 / _STRICT:,.0f} healthy steps, and single numbers one in {1 / _LOOSE:,.0f}; alerts keep
the limits of every run.
"""


def write(runs: Sequence[Run]) -> str:
    """Write the page."""
    compared = compare(runs)
    alerts, healthy = compared["alerts"], sum(run.fault is None for run in runs)
    noticed = ["loss", "gradient norm", "alerts", "steps until the alert", "earlier than the loss",
               "earlier than the gradient norm", "right block"]  # fmt: skip
    live = {name: evaluate_alerts(runs, name, AFTER) for name in BATCHES}
    return "\n".join([
        _HEAD,
        f"{len(runs) - healthy} runs with a fault, and {healthy} healthy ones with "
        f"{alerts.rate.trials:,} steps read, in which {alerts.rate.count} alerts came: "
        f"{per(alerts.rate, 10_000)} in 10,000 steps.\n",
        *table(["faults", *noticed], [(kind, *cells(compared, KINDS[kind])) for kind in KINDS]),
        "\n## By fault, every step read\n",
        *table(
            ["", "fault", *noticed],
            [(fault.kind, f"{fault.words}{' *' * fault.held_out}", *cells(compared, [name]))
             for name, fault in FAULTS.items() if alerts.of([name])], words=2,
        ),
        "\n![Share noticed, by the steps since the fault](pictures/warnings.png)\n",
        "## As a user gets it\n",
        "All defaults, as a run of 1,500 steps plans them at the costs of two sizes of batches. "
        "An alert counts from the step at which it stands in the record.\n",
        *table(
            ["batches", "", f"within {_SOON} steps", f"within {AFTER} steps", "steps",
             "right block", "false in 10,000 steps"],
            [(name, kind, share(evaluate_alerts(runs, name, _SOON).of(KINDS[kind])),
              share(result.of(KINDS[kind])), spread(delays(result.of(KINDS[kind]))),
              located(result.of(KINDS[kind])), per(result.rate, 10_000))
             for name, result in live.items() for kind in KINDS], words=2,
        ),
        "\n## By detector\n",
        *table(
            ["looks at", *KINDS, "right block", "false in 1,000 steps"],
            [(name, *(share(result.of(own)) for own in KINDS.values()), located(result.outcomes),
              per(result.rate, 1_000))
             for name in DETECTORS for result in [evaluate(runs, name, _LOOSE)] if result.outcomes],
        ),
        "",
    ])  # fmt: skip


def compare(runs: Sequence[Run]) -> dict[str, Result]:
    """Judge loss, gradient norm and alerts."""
    found = {name: evaluate(runs, name, _STRICT) for name in ("loss", "gradient norm")}
    return found | {"alerts": evaluate_alerts(runs, EACH_STEP)}


def cells(results: dict[str, Result], names: Sequence[str]) -> list[str]:
    """Write what loss, gradient norm and alerts noticed of some faults, and when."""
    found = {name: result.of(names) for name, result in results.items()}
    leads = []
    for other in ("loss", "gradient norm"):
        pairs = [(o.delay, a.delay) for o, a in zip(found[other], found["alerts"], strict=True)]
        alone = sum(theirs is None and own is not None for theirs, own in pairs)
        both = [theirs - own for theirs, own in pairs if theirs is not None and own is not None]
        words = [spread(both)] * bool(both) + [f"alone in {alone}"] * bool(alone)
        leads.append("; ".join(words) or "-")
    alerts = found["alerts"]
    return [*map(share, found.values()), spread(delays(alerts)), *leads, located(alerts)]


def per(rate: Rate, number: int) -> str:
    """Format a rate in so many trials with its 95 % interval, "0.5 (0.1 to 1.5)"."""
    if not rate.trials:
        return "-"
    one, low, high = (number * each for each in (rate.count / rate.trials, rate.low, rate.high))
    return f"{one:.1f} ({low:.1f} to {high:.1f})"


def share(outcomes: Sequence[Outcome]) -> str:
    """Format the share of runs with an alarm."""
    noticed = len(delays(outcomes))
    return f"{100 * noticed / len(outcomes):.0f} %" if outcomes else "-"


def spread(numbers: Sequence[float]) -> str:
    """Format the median with the quartiles, "3 (1 to 12)"; "-" for none.

    Example:
        >>> spread([1, 3, 12]), spread([])
        ('3 (2 to 8)', '-')
    """
    if not numbers:
        return "-"
    low, _, high = quantiles([*numbers, numbers[-1]] if len(numbers) < 2 else numbers, n=4,
                             method="inclusive")  # fmt: skip
    return f"{median(numbers):.0f}" + (f" ({low:.0f} to {high:.0f})" if low < high else "")


def delays(outcomes: Iterable[Outcome]) -> list[int]:
    """List the steps from the fault to the alarm, of the runs with one."""
    return [outcome.delay for outcome in outcomes if outcome.delay is not None]


def located(outcomes: Iterable[Outcome]) -> str:
    """Format how often the alarm named the layer of the faulty block."""
    known = [outcome.located for outcome in outcomes if outcome.located is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def draw(runs: Sequence[Run]) -> Figure:
    """Draw for each fault the share of the runs in which it was noticed, over the steps since."""
    compared = compare(runs)
    faults = [fault for name, fault in FAULTS.items() if compared["alerts"].of([name])]
    rows = -(-len(faults) // 5)
    figure = Figure(figsize=(13.2, 2.35 * rows + 0.5), dpi=80, layout="constrained")
    panels = figure.subplots(rows, 5, squeeze=False).ravel()
    for panel in panels:
        panel.axis("off")
    for panel, fault in zip(panels, faults, strict=False):
        panel.axis("on")
        for name, (colour, width) in _DRAWN.items():
            outcomes = compared[name].of([fault.name])
            known, count = sorted(delays(outcomes)), len(outcomes)
            steps = [0, *known, fault.steps]
            shares = [n / count for n in (*range(len(known) + 1), len(known))]
            panel.step(steps, shares, where="post", color=colour, lw=width, label=name)
        words = f"{fault.kind}: {fault.words}{' (held out)' * fault.held_out}"
        panel.set_title(textwrap.fill(words, 33), loc="left", fontsize=9)
        panel.set(ylim=(-0.04, 1.04), yticks=[0, 0.5, 1], xlim=(0, fault.steps))
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  frameon=False)  # fmt: skip
    figure.supxlabel("steps since the fault")
    figure.supylabel("share of the runs in which it was noticed")
    return figure
