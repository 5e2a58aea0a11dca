"""Unseen faults do what their words say; totals and half widths are computed from runs."""

import copy
import functools
import math
import random

import pytest
import torch

from geomon import read
from geomon.analysis.bands import WATCHED
from geomon.record.tags import layer_tag
from recipes.enwik8.text import characters
from recipes.faults import campaign, unseen, widths
from recipes.faults.campaign import PREFIX, Ran, Seen
from recipes.faults.training import BATCHES, EACH_STEP, make_step
from recipes.faults.trainings import CONTEXT, LENGTH, SEQUENCES, TRAININGS, new_task
from recipes.faults.unseen import CELLS, FAULT_STEP, HEALTHY, UNSEEN, Cell, turned
from recipes.faults.unseen_page import by_fault, healthy, totals, with_harm, write
from support.readings import reading_of

CORPUS = characters(("the geometry of representations while a model trains. " * 400).encode(), "a")
FAULTY = [cell for cell in CELLS if cell.fault]


def steps(task, each_step=lambda since: None, count=2):
    generator, losses = torch.Generator().manual_seed(1), []
    for since in range(count):
        each_step(since)
        losses.append(make_step(task, [], FAULT_STEP + since, generator)[0])
    return losses


def weights_of(task):
    return {name: each.detach().clone() for name, each in task.model.named_parameters()}


@pytest.fixture(scope="module")
def tasks():
    found = {name: new_task(name, CORPUS) for name in TRAININGS}
    for task in found.values():
        steps(task)
    return found


@pytest.fixture(scope="module")
def healthy_steps(tasks):
    """Losses and weights of two healthy steps more, by the name of a training."""

    @functools.cache
    def made(name):
        task = copy.deepcopy(tasks[name])
        return steps(task), weights_of(task)

    return made


@pytest.fixture
def healthy_and_faulty(tasks, request):
    cell = request.param
    task = copy.deepcopy(tasks[cell.training])
    torch.manual_seed(0)
    return cell, copy.deepcopy(task), task


def cells(name):
    own = [cell for cell in FAULTY if cell.what == name]
    return pytest.mark.parametrize(
        "healthy_and_faulty", own, ids=lambda cell: cell.training, indirect=True
    )


def block_of(cell, task):
    return task.blocks()[cell.block]


# -- faults ----------------------------------------------------------------------------------------


def test_cells_are_those_of_the_page():
    assert len({*CELLS}) == len(CELLS)
    assert len(FAULTY) == 41
    assert sum(cell.fault.local for cell in FAULTY) == 32
    assert {cell.what for cell in FAULTY} == {*UNSEEN}
    assert len(CELLS) - len(FAULTY) == 24
    assert {cell.what for cell in CELLS if not cell.fault} == {*HEALTHY}


@pytest.mark.parametrize("cell", FAULTY, ids=lambda cell: f"{cell.training}-{cell.what}")
def test_a_fault_changes_the_training_and_at_once_only_the_block_that_it_is_put_into(
    cell, tasks, healthy_steps
):
    faulty = copy.deepcopy(tasks[cell.training])
    before, each_step = weights_of(faulty), cell.plant(faulty)
    each_step(0)
    own = {id(each) for each in block_of(cell, faulty).parameters()} if cell.fault.local else set()
    for name, parameter in faulty.model.named_parameters():
        assert id(parameter) in own or torch.equal(parameter, before[name]), name
    losses, weights = healthy_steps(cell.training)
    differ = steps(faulty, each_step) != losses
    pairs = zip(weights.values(), weights_of(faulty).values(), strict=True)
    assert differ or any(not torch.equal(*pair) for pair in pairs)


def outputs_of(module, task, inputs):
    """Return the input and output of a module in a pass."""
    found = []
    handle = module.register_forward_hook(lambda m, args, out: found.append((args, out)))
    with torch.no_grad():
        task.model(**inputs)
    handle.remove()
    (args, out) = found[0]
    return args[0], out[0] if isinstance(out, tuple) else out


@cells("half_residual")
def test_half_of_the_input_is_taken_from_what_leaves_the_block(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    cell.plant(faulty)
    inputs = faulty.held_out.inputs
    hidden, usual = outputs_of(block_of(cell, healthy), healthy, inputs)
    hidden_too, changed = outputs_of(block_of(cell, faulty), faulty, inputs)
    assert torch.equal(hidden, hidden_too)
    if cell.training == "bert":  # a norm follows
        assert not torch.allclose(usual, changed)
    else:
        torch.testing.assert_close(changed, usual - 0.5 * hidden)


@cells("moved_queries")
def test_queries_are_those_of_seven_places_before(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    cell.plant(faulty)
    inputs = faulty.held_out.inputs
    (_, usual), (_, moved) = (
        outputs_of(task.part(cell.block, "query"), task, inputs) for task in (healthy, faulty)
    )
    assert torch.equal(moved[:, 7:], usual[:, :-7])


@cells("head_lost")
def test_one_head_gives_nothing_and_the_others_what_they_gave(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    cell.plant(faulty)
    inputs, heads = faulty.held_out.inputs, []
    for task in (healthy, faulty):
        module = task.part(cell.block, "attention")
        rows, out = outputs_of(module, task, inputs)
        # A hook before the pass changes what the module gets: the rows are recovered from there.
        heads.append(rows.unflatten(-1, (4, -1)))
        torch.testing.assert_close(
            module.weight @ rows[0, 0] + (0 if module.bias is None else module.bias), out[0, 0]
        )
    is_equal = [torch.equal(*(each[..., head, :] for each in heads)) for head in range(4)]
    assert is_equal.count(False) == 1
    assert not heads[1][..., is_equal.index(False), :].any()


@cells("keys_turned")
def test_keys_are_turned_as_rotary_positions_one_place_on(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    cell.plant(faulty)
    width = faulty.part(cell.block, "self").head_dim
    # Queries that are turned too are at the same distance from the keys as before.
    faulty.part(cell.block, "query").register_forward_hook(lambda m, a, rows: turned(rows, width))
    with torch.no_grad():
        both = [task.model(**task.held_out.inputs).logits for task in (healthy, faulty)]
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)


@cells("mask_leaks")
def test_the_block_alone_sees_later_tokens(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    cell.plant(faulty)
    ids = faulty.held_out.inputs["input_ids"][:4]
    other = torch.cat([ids[:, :20], ids[:, 20:].flip(1)], dim=1)
    for task, leaks in ((healthy, False), (faulty, True)):
        first = [
            outputs_of(block, task, {"input_ids": each})[1][:, :20]
            for each in (ids, other)
            for block in [block_of(cell, task)]
        ]
        assert torch.allclose(*first, atol=1e-6) != leaks
        before = [
            outputs_of(block_of(cell, task), task, {"input_ids": each})[0][:, :20]
            for each in (ids, other)
        ]
        assert torch.allclose(*before, atol=1e-6)


@cells("gradient_burst")
def test_gradients_are_thirty_times_as_large_for_five_steps(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    each_step = cell.plant(faulty)
    batch = faulty.draw(torch.Generator().manual_seed(3))
    healthy.model.zero_grad()
    healthy.loss(batch).backward()
    for since, factor in ((0, 30.0), (4, 30.0), (5, 1.0)):
        each_step(since)
        faulty.model.zero_grad()
        faulty.loss(batch).backward()
        for at, (usual, own) in enumerate(zip(healthy.blocks(), faulty.blocks(), strict=True)):
            for pair in zip(usual.parameters(), own.parameters(), strict=True):
                first, second = (each.grad for each in pair)
                expected = factor if at == cell.block else 1.0
                torch.testing.assert_close(second, expected * first)


@cells("rounded")
def test_weights_of_the_block_are_those_of_bfloat16_before_each_step(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    each_step = cell.plant(faulty)
    steps(faulty, each_step)
    each_step(2)
    for at, block in enumerate(faulty.blocks()):
        is_rounded = all(torch.equal(each, each.bfloat16().float()) for each in block.parameters())
        assert is_rounded == (at == cell.block)


@cells("dropout")
def test_dropout_leaves_out_some_and_only_while_training(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    before = faulty.held_out_loss()
    cell.plant(faulty)
    assert faulty.held_out_loss() == before
    _, out = outputs_of(faulty.part(cell.block, "mlp"), faulty, faulty.held_out.inputs)
    assert 0.45 < (out == 0).float().mean() < 0.55


@cells("same_batch")
def test_the_first_batch_comes_again_and_again(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    cell.plant(faulty)
    generator = torch.Generator().manual_seed(3)
    first, second = (faulty.draw(generator) for _ in range(2))
    assert torch.equal(first.labels, second.labels)


@cells("frozen_embedding")
def test_the_embedding_stays_and_the_rest_moves(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    cell.plant(faulty)
    before = weights_of(faulty)
    steps(faulty)
    stays = [name for name, each in weights_of(faulty).items() if torch.equal(each, before[name])]
    assert stays == ["model.embed_tokens.weight"]


@cells("state_lost")
def test_the_next_step_is_the_first_of_a_new_optimizer(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    cell.plant(faulty)
    steps(faulty, count=1)
    assert {int(state["step"]) for state in faulty.optimizer.state.values()} == {1}


@cells("labels_shuffled")
def test_labels_change_their_places_for_thirty_steps(healthy_and_faulty):
    cell, _, faulty = healthy_and_faulty
    each_step = cell.plant(faulty)
    labels = torch.arange(64).view(8, 8)
    for since in (0, 29, 30):
        each_step(since)
        found = faulty.labels(labels)
        assert torch.equal(found.flatten().sort()[0], labels.flatten())
        assert torch.equal(found, labels) == (since == 30)


@cells("loss_once")
def test_one_loss_is_a_thousand_times_as_large(healthy_and_faulty):
    cell, healthy, faulty = healthy_and_faulty
    usual, changed = steps(healthy), steps(faulty, cell.plant(faulty))
    assert changed[0] == pytest.approx(1_000 * usual[0], rel=1e-5)
    assert 0.5 * usual[1] < changed[1] < 2 * usual[1]


@pytest.mark.parametrize(("name", "factor"), [("rate_x10", 10.0), ("weight_decay", 1.0)])
def test_a_global_fault_of_the_optimizer(tasks, name, factor):
    cell = next(cell for cell in FAULTY if cell.what == name)
    task = copy.deepcopy(tasks[cell.training])
    rate, decay = task.rate(400), task.optimizer.param_groups[0]["weight_decay"]
    cell.plant(task)(40)
    assert task.rate(400) == pytest.approx(factor * rate)
    now = task.optimizer.param_groups[0]["weight_decay"]
    assert now == pytest.approx(decay * (100 if name == "weight_decay" else 1))


def test_changes_that_are_no_fault(tasks):
    task = tasks["llama_text"]
    usual, generator = task.rate, torch.Generator().manual_seed(0)
    rates = {"plain": usual(370), "warm-up restarted": usual(370) * 11 / 40}
    rates |= {"rate dropped": 0.1 * usual(370), "schedule restarted": usual(50)}
    shapes = {"batch doubled": (2 * SEQUENCES, CONTEXT), "longer sequences": (SEQUENCES, 96)}
    for what, change in HEALTHY.items():
        own = copy.deepcopy(task)
        each_step = change(own)
        before = weights_of(own)
        if each_step:
            each_step(10)
        assert own.rate(370) == pytest.approx(rates.get(what, usual(370))), what
        shape = own.draw(generator).inputs["input_ids"].shape
        assert shape == shapes.get(what, (SEQUENCES, CONTEXT)), what
        assert all(torch.equal(each, before[name]) for name, each in weights_of(own).items())


# -- totals ----------------------------------------------------------------------------------------


def ran(training, what, at=None, place=("", 1), loss=2.0):
    """A run whose planned record has one alert at so many steps after the fault."""
    cell = Cell(training, what)
    if place == "right":
        place = cell.place
    seen = [] if at is None else [Seen(FAULT_STEP + at, place, "left_band", f"{what} seen")]
    records = {EACH_STEP: seen, **{name: [] for name in BATCHES}}
    return Ran(cell, records, [loss] * (LENGTH - FAULT_STEP), 2.0)


RUNS = [
    ran("llama_text", "plain"),
    ran("llama_text", "norm_gain", 3, "right", loss=2.04),
    ran("llama_text", "head_lost", 70, ("", 9), loss=2.06),
    ran("llama_text", "rounded"),
    ran("llama_text", "same_batch", 60, None, loss=math.nan),
    ran("llama_text", "weight_decay", 120, None),
]


def test_totals_count_what_was_noticed_in_time_by_group_with_the_right_block():
    lines = [*totals(with_harm(RUNS))]
    assert lines[0].startswith(
        "| looked at | within | all (5) | in one block (3) | everywhere (2) | with harm (2) |"
    )
    assert lines[2] == (
        "| every step | 50 steps | 1 of 5 | 1 of 3 | 0 of 2 | 0 of 2 | 0 of 1 | 1 of 1 |"
    )
    assert lines[3] == (
        "| every step | 110 steps | 3 of 5 | 2 of 3 | 1 of 2 | 2 of 2 | 1 of 1 | 1 of 2 |"
    )
    assert "| 0 of 5 |" in lines[4]


def test_a_fault_is_listed_with_the_steps_until_its_alert():
    lines = [*by_fault(with_harm(RUNS))]
    assert "| gains of one norm × 3 | 0 of 1 | 1 of 1 (+3) | 0 of 1 | 0 of 1 | 1 of 1 |" in lines
    assert "| output of one head set to 0 | 1 of 1 | 1 of 1 (+70) | 0 of 1 | 0 of 1 |" in "".join(
        lines
    )


def test_alerts_of_healthy_runs_are_listed_with_their_sentences(tmp_path):
    changed = [ran("llama_text", "plain"), ran("bert", "batch doubled", 5)]
    text = "\n".join(healthy(tmp_path, changed))
    assert "2 healthy runs, 800 steps from step 200 on." in text
    assert "| every step | 0 | 1 | 12.5 (0.3 to 69.6) |" in text
    assert "- every step, BERT, masked characters, batch doubled, step 365: batch doubled seen" in (
        text
    )


# -- runs ------------------------------------------------------------------------------------------


def test_runs_share_their_first_steps_and_what_is_complete_is_kept(tmp_path, monkeypatch):
    for module in (campaign, unseen):
        monkeypatch.setattr(module, "FAULT_STEP", 6)
    for name, steps_of in {"_FIRST_READ": 3, "LENGTH": 12, "WATCHED_STEPS": 4, "_LAST": 2}.items():
        monkeypatch.setattr(campaign, name, steps_of)
    some = [Cell("vit", "plain"), Cell("vit", "norm_gain")]
    campaign.run("vit", CORPUS, tmp_path, some)
    runs = campaign.read_runs(tmp_path, some)
    assert [len(each.losses) for each in runs] == [6, 4]
    assert runs[1].losses[0] != runs[0].losses[0]
    first = read(tmp_path / "vit" / PREFIX / EACH_STEP)
    assert [reading.step for reading in first] == [0, 3, 4, 5]
    after = read(tmp_path / "vit" / "norm_gain" / EACH_STEP)
    assert [reading.step for reading in after] == [6, 7, 8, 9]
    assert after[0].training["loss"] == pytest.approx(runs[1].losses[0], rel=1e-6)
    text = write(tmp_path)
    assert "| gains of one norm × 3 | ViT, the most common texture |" in text
    finished = tmp_path / "vit" / "plain" / "finished.json"
    before = finished.stat().st_mtime_ns
    campaign.run("vit", CORPUS, tmp_path, some)
    assert finished.stat().st_mtime_ns == before


def test_a_run_that_fails_ends_the_campaign(tmp_path, capfd):
    def fails():
        raise ValueError("no such block")

    with pytest.raises(RuntimeError, match="a run failed"):
        campaign._in_fork(fails)
    assert "no such block" in capfd.readouterr().err


# -- smallest half widths --------------------------------------------------------------------------


def test_the_half_width_that_a_jump_needs_is_its_distance_from_the_line(monkeypatch):
    chance, stacks, found = random.Random(0), widths._Stacks(), []
    for name in WATCHED:
        monkeypatch.setitem(WATCHED, name, WATCHED[name]._replace(least=1e-9))
    for step in range(200, 260):
        jump = 0.7 if step >= 250 else 0.0
        values = {
            layer_tag("variance", 2): math.exp(1.0 + 1e-4 * chance.gauss(0, 1) + jump),
            layer_tag("variance", 1): 3.0 + 1e-3 * chance.gauss(0, 1),
        }
        found += [(step, *one) for one in stacks.add(reading_of(values, step))]
    step, metric, place, distance = next(one for one in found if one[0] >= 250)
    assert (step, metric, place) == (251, "variance", ("", 2))
    assert distance == pytest.approx(0.7, abs=0.01)
