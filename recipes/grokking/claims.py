"""What is said of geometry before generalisation, beside what the records hold."""

import math
from collections.abc import Sequence
from typing import Any

from recipes.grokking.leads import Course, false_alarms, leads
from recipes.study import Claim

COMMAND = "make grokking"
PICTURE = "docs/pictures/grokking.png"

_WORDS = {
    "local_dimension": "mean local dimension",
    "effective_rank_last": "effective rank at the last token",
}
_SOURCE = {
    # The authors' code names its experiments; their sections in the paper were not looked up.
    "local_dimension": "2506.01034, abstract, experiment Local Dimensions Detect Grokking",
    "effective_rank_last": "none: a conjecture of this project",
}
_PUBLISHED = {
    "local_dimension": "the mean drops as the accuracy on held-out pairs begins to rise",
    "effective_rank_last": "not published",
}
_PUBLISHED_CONTROL = {
    "local_dimension": "it rises to the end at train fractions 0.1 and 0.15, which do not "
    "generalise (figure in the authors' code)",
    "effective_rank_last": "not published",
}
_PUBLISHED_RULE = {
    "local_dimension": "not published: curves are shown, and no rule for a warning",
    "effective_rank_last": "not published",
}
# A fall is a loss of a tenth.
_FALLEN = 0.9
# Largest share of the control runs in which a warning may be false.
_TOLERATED = 0.1


def claims(
    runs: Sequence[Course], controls: Sequence[Course], *, differs: str, seconds: float = math.nan
) -> list[Claim]:
    """Compare what is said with the records; each curve has four claims.

    Args:
        runs: Trainings on enough pairs to generalise; at least one has.
        controls: Trainings on too few.
        differs: In which way they differ from the published ones.
        seconds: Time of the command on two cores.
    """
    found = []
    for name, words in _WORDS.items():
        same: dict[str, Any] = {
            "source": _SOURCE[name], "command": COMMAND, "picture": PICTURE,
            "differs": differs, "seconds": seconds,
        }  # fmt: skip
        generalised = [run for run in runs if run.generalised() is not None]
        found += [
            Claim(
                name=f"{name}_falls_before_generalisation",
                asserts=f"The {words} falls by a tenth or more before generalisation.",
                published=_PUBLISHED[name],
                quantity=f"{words} at the last reading with less than a tenth of the held-out "
                "pairs answered, as a share of its highest value until then",
                values=tuple(run.fall(name) for run in generalised),
                below=_FALLEN,
                **same,
            ),
            Claim(
                name=f"{name}_stays_without_generalisation",
                asserts=f"The {words} does not fall by a tenth in runs that never generalise.",
                published=_PUBLISHED_CONTROL[name],
                quantity=f"{words} at the end of the control, as a share of its highest value",
                values=tuple(control.fall(name) for control in controls),
                above=_FALLEN,
                **same,
            ),
            Claim(
                name=f"{name}_leads_against_control",
                asserts=f"The {words} is below all that the controls have had before half of the "
                "held-out pairs are answered.",
                published=_PUBLISHED_RULE[name],
                quantity="steps from the first such reading to an accuracy of 0.5",
                values=tuple(map(float, leads(generalised, controls, name, margin=0.0))),
                above=0.0,
                **same,
            ),
        ]
        if len(controls) > 1:
            found.append(
                Claim(
                    name=f"{name}_raises_no_false_alarm",
                    asserts=f"The {words} of a control is not below all that the others have had.",
                    published=_PUBLISHED_RULE[name],
                    quantity="share of the controls, each left out in turn, that raise an alarm",
                    values=tuple(map(float, false_alarms(controls, name, margin=0.0))),
                    repeated="control",
                    counted=True,
                    below=_TOLERATED,
                    **same,
                )
            )
    return found
