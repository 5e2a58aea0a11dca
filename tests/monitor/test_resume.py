"""A monitor raises alerts on changes at a resume, and at a rewind."""

import pytest
import torch

from geomon import Monitor, read
from support.models import PlainDecoder

# The last one reads token ids, so that readings know whether their rows are the same.
METRICS = [
    "variance", "attention_entropy_normalised", "max_logit", "qk_dot", "weight_norm",
    "within_variance",
]  # fmt: skip
PROBE = [torch.arange(256).view(16, 16) % 23]


def train(monitor, model, steps, source):
    """Train, in a way: weights move a little at each step."""
    inline = source == "inline"
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randint(0, 23, (16, 16), generator=generator)
        with torch.no_grad(), monitor(step):
            model(inputs if inline else inputs[:1])
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 1e-3 * noise


def spoil(model):
    """Make queries and keys of the second block three times as large."""
    model.blocks[1].c_attn.weight.data[:64] *= 3


@pytest.mark.parametrize("source", ["probe", "inline"])
@pytest.mark.parametrize("way", ["another process", "back in one process"])
@pytest.mark.parametrize("is_spoiled", [True, False])
def test_weights_that_changed_at_a_resume_are_an_alert(way, source, is_spoiled, tmp_path, caplog):
    torch.manual_seed(0)
    model = PlainDecoder()
    options = {
        "directory": tmp_path, "schedule": 1, "checks": None, "budget": None, "metrics": METRICS,
        "probe": PROBE if source == "probe" else None,
    }  # fmt: skip
    monitor = Monitor(model, **options)
    train(monitor, model, range(0, 260, 20), source)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(monitor, model, range(260, 300, 20), source)
    if way == "another process":
        monitor.close()
        monitor = Monitor(model, **options)
    model.load_state_dict(weights)
    if is_spoiled:
        spoil(model)
    train(monitor, model, [260], source)
    monitor.close()
    found = [alert for alert in read(tmp_path).alerts if alert.note.kind == "changed_at_resume"]
    assert [alert.step for alert in found] == [260] * is_spoiled
    lines = [line for line in caplog.messages if line.startswith("alert at step 260: changed at")]
    assert len(lines) == is_spoiled
    if is_spoiled:
        assert "(layer 2)" in lines[0]
        last = 260 if source == "probe" else 240  # the same rows at the same step
        assert f"before is at step {last}" in found[0].words()


def test_a_resume_with_other_settings_is_said_once_where_curves_break(tmp_path, caplog):
    model, told = PlainDecoder(width=8, layers=2, heads=2), []
    options = {"directory": tmp_path, "schedule": 1, "checks": None, "budget": None}
    for steps, tokens in ((range(2), 64), (range(2, 4), 32), (range(4, 5), 32), (range(5, 6), 48)):
        caplog.clear()
        monitor = Monitor(model, metrics=["variance"], tokens=tokens, **options)
        train(monitor, model, steps, "inline")
        monitor.close()
        told.append([text for text in caplog.messages if "other settings" in text])
    words = [
        f"From step {step} on, this run was read with other settings (tokens {now} instead of "
        f"{before}): its curves have a break there."
        for step, now, before in ((2, 32, 64), (5, 48, 32))
    ]
    assert told == [[], words[:1], [], words[1:]]
    notes = {r.step: [x.words() for x in r.notes if x.kind == "other settings"]
             for r in read(tmp_path)}  # fmt: skip
    assert notes == {0: [], 1: [], 2: words[:1], 3: [], 4: [], 5: words[1:]}
