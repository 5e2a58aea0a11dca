"""The self-check: what was expected of the first window against what was seen."""

from collections.abc import Iterable, Sequence

from geomon.capture.snapshot import CAPTURED, Layer, Snapshot

# One view of each source stands for it: the others are missing with it, or for reasons that are
# no fault (a model without token ids, attention whose queries are not seen).
_STANDS_FOR = {"hidden": "hidden", "attention": "visible", "projection": "projected_query"}
_WORDS = {
    "hidden": "hidden states",
    "attention": "attention",
    "projection": "queries and keys as projected",
}


class NotSeenError(RuntimeError):
    """Something that the metrics read is in the model, going by its anatomy, and was not seen."""


def complaint(snapshot: Snapshot, views: Iterable[str]) -> str | None:
    """What was expected and not seen, why, and what to do; None where all was seen.

    Expected is every source that the views come from, in every stack that has it. Single layers
    without it (dropped at random, linear attention in a hybrid) are noted where they are measured.

    Args:
        snapshot: Of the first window.
        views: Captured views that the metrics come down to.
    """
    asked = {CAPTURED[view] for view in views}
    found = []
    for source in _STANDS_FOR:
        if source not in asked:
            continue
        reasons = _missing(snapshot.layers, source)
        for reason, layers in reasons.items():
            where = _where(layers, snapshot.layers)
            found.append(f"{_WORDS[source]} at {where}: {reason}")
            if source == "hidden":  # nothing else can have been seen there
                asked = asked - {"attention", "projection"}
    if not found:
        return None
    return (
        f"not seen in the first pass that was watched: {'; '.join(found)}. "
        "print(geomon.describe(model)) shows what is expected where; blocks=... names other "
        "blocks, metrics=select(...) leaves out what cannot be seen"
    )


def _missing(layers: Sequence[Layer], source: str) -> dict[str, list[Layer]]:
    """Layers of stacks that lack the source altogether, by the reason."""
    view = _STANDS_FOR[source]
    found: dict[str, list[Layer]] = {}
    for stack in dict.fromkeys(layer.stack for layer in layers):
        expected = [x for x in layers if x.stack == stack and x.index > 0 and source in x.sources]
        if any(view in layer.captured for layer in expected):
            continue
        for layer in expected:
            found.setdefault(layer.missing.get(view, "it was not seen"), []).append(layer)
    return found


def _where(layers: Sequence[Layer], everything: Sequence[Layer]) -> str:
    """Some layers in words: the first by name, and how many of how many."""
    stacks = {layer.stack for layer in layers}
    whole = sum(layer.stack in stacks and layer.index > 0 for layer in everything)
    return f"{layers[0].name} ({len(layers)} of {whole} layers)" if whole > 1 else layers[0].name
