"""The application of `geomon watch`, by textual's pilot: no terminal, no clock, no waiting."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from shown import alerted, write
from tagged import raised_of, with_values
from textual.widgets import DataTable

from geomon.record import FILE_NAME
from geomon.show.terminal.app import WatchApp
from geomon.show.terminal.runs import Watched


@asynccontextmanager
async def watched(*folders, size=(100, 30), stack=None):
    """The application on some folders, after a first look at them."""
    app = WatchApp([Watched(folder, stack, folder.name) for folder in folders], poll=None)
    async with app.run_test(size=size) as pilot:
        app.look()
        await pilot.pause()
        yield app, pilot


def screen(app):
    """The characters of the screen, line by line."""
    lines = app.screen._compositor.render_strips(app.size)
    return ["".join(segment.text for segment in strip) for strip in lines]


def text(app):
    return "\n".join(line.rstrip() for line in screen(app))


def words(app):
    """What the screen says, as one line: wherever its lines are broken."""
    return " ".join(text(app).split())


async def words_after_look(app, pilot):
    app.look()
    await pilot.pause()
    return words(app)


def run(story):
    asyncio.run(story())


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
def test_dimensions_phases_and_alerts_are_whole_at_any_size_above_a_chart(
    make_readings, tmp_path, size
):
    kinds = [(16, "logit_growth"), (64, "not_finite"), (256, "entropy_collapse")]
    kinds.append((512, "logit_growth"))
    folder = write(tmp_path / "a", alerted(make_readings(layers=12, heads=16), kinds))

    async def story():
        async with watched(folder, size=size) as (app, pilot):
            said = words(app)
            assert "a · step 1,500 · " in said
            assert (
                "Alerts: not finite at step 64, logit growth at step 16, entropy collapse at step "
                "256. intrinsic dimension 5.3 ± 0.1, compressing since step 256, 28 % below its "
                "peak 7.4 (between steps 128 and 256); distinct tokens 4.9 ± 0.1, falling since "
                "step 0, 85 % below 32.1."
            ) in said
            assert sum(any("⠀" < c <= "⣿" for c in line) for line in screen(app)) >= 6  # a curve
            assert sum(line.count("│") >= 3 for line in screen(app)) >= 6  # alerts
            # Two charts, where there is room.
            assert ("by layer not measured" in said) == (size[0] > 100)
            assert screen(app)[-1].startswith("q quit ? help")
            assert "r run" not in screen(app)[-1]
            assert not app.query_one("#run").display  # there is nothing to choose
            await pilot.press("t", "t", "t")
            listed = re.findall(
                r"Alert at step (\S+?):? (?:\(first of (\d)\): )?(\w+ \w+)", words(app)
            )
            assert listed == [
                ("64", "", "not finite"), ("16", "2", "logit growth"),
                ("256", "", "entropy collapse"),
            ][: len(listed)]  # fmt: skip
            assert listed

    run(story)


def test_keys_change_what_is_shown(make_readings, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    losses = {"training/loss": [4.0] * 8 + [float("nan")], "training/probe_loss": [3.5] * 9}
    folder = write(tmp_path / "a", make_readings(curves=losses))

    async def story():
        async with watched(folder, size=(120, 40)) as (app, pilot):

            async def press(*keys):
                await pilot.press(*keys)
                await pilot.pause()
                return text(app)

            assert "─intrinsic dimension  5.3 ± 0.1─" in text(app)
            assert "─by layer  not measured" in text(app)
            assert "─loss on the probe  3.5─" in text(app)
            assert "1,000" in text(app)
            assert "1,000" not in await press("x")
            assert "●" in text(app)  # the peak, of the dimension alone
            assert "─intrinsic dimension, distinct tokens  4.9" in await press("m")
            assert "●" not in text(app)
            assert "─anisotropy, largest layer  0.60" in await press("m", "m", "m")
            assert "─anisotropy  not measured" in await press("M")
            assert "─anisotropy, layer 0  0.11" in await press("l")
            assert "─anisotropy, layer 2  0.60" in await press("l", "l")
            assert "─anisotropy, layer 1  0.28" in await press("L")
            assert "─by layer  + start  • peak 256  ━ now" in text(app)
            assert "━ step 1,024" in await press("p")
            assert "━ step 1,024" in await press("p", "n")
            assert "━ now" in await press("n")
            assert "+ start" not in await press(*["p"] * 20)
            assert app.step == 0
            assert "━ now" in await press("e")
            assert "attention entropy (nats)" in await press("t", "t")
            assert "cosine of mean query" in await press("h")
            assert "next or previous metric" in await press("question_mark")
            assert "no alerts, no notes" in await press("T")
            app.query_one("#metric").value = "training/loss"
            await pilot.pause()
            assert "─Training loss  4.0 at step 1,024" in await press("t", "t")
            assert "not a value of layers" in text(app)
            await press("ctrl+p")
            assert len(app.screen_stack) == 1  # the keys are those of the footer

    run(story)


def test_heads_are_those_of_the_reading_that_is_chosen(make_readings, tmp_path):
    folder = write(tmp_path / "a", make_readings(heads=2, layers=3))

    async def story():
        async with watched(folder) as (app, pilot):
            await pilot.press("t", "t")
            shown = []
            for _ in range(2):
                value = app.reading.values["attention_entropy/layer_01/head_1"]
                table = app.query_one(DataTable)
                rows = [str(row.label) for row in table.ordered_rows]
                assert rows == ["layer 3", "layer 2", "layer 1"]
                assert str(table.get_cell_at((2, 1))).strip() == f"{value:.1f}"
                assert f" {value:.1f} " in text(app)
                words = f"─step {app.reading.step:,}  columns: heads  colours: 2.0 to 3.0"
                assert words in text(app)
                shown.append(value)
                await pilot.press(*"pppppp")
            assert shown[0] != shown[1]

    run(story)


@pytest.mark.parametrize("colours", [True, False])
def test_several_runs_lie_over_one_another_with_a_legend(
    make_readings, tmp_path, monkeypatch, colours
):
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    mark = "━" if colours else "•"
    one = write(tmp_path / "one", make_readings())
    *first, last = make_readings((0, 16, 32, 64))
    last = with_values(last, last.values, notes=["of the other"])
    other = write(tmp_path / "other", [*first, last])

    async def story():
        async with watched(one, other, tmp_path / "third", size=(120, 40)) as (app, pilot):
            said = words(app)
            assert "━ one · step 1,500" in said
            assert f"{mark} other · step 64" in said
            assert said.count("intrinsic dimension 5.") == 2
            assert "third · waiting for" in said
            assert (text(app).count("•") > 10) == (not colours)
            assert "r run" in screen(app)[-1]
            await pilot.press("m", "m", "m")
            assert f"by layer  ━ one  {mark} other" in text(app)
            await pilot.press("t", "t", "t")
            assert "of the other" not in text(app)
            await pilot.press("r")
            assert "of the other" in text(app)
            write(tmp_path / "third", make_readings())
            app.look()
            await pilot.pause()
            assert "third · step 1,500" in text(app)

    run(story)


def test_a_record_is_followed_while_it_is_written(make_readings, tmp_path):
    readings = make_readings()
    path = tmp_path / FILE_NAME

    async def story():
        async with watched(tmp_path) as (app, pilot):
            assert "· waiting for" in await words_after_look(app, pilot)
            path.write_text('{"run": {}}\n')
            assert "no readings yet" in await words_after_look(app, pilot)
            line = readings[0].line()
            path.write_text('{"run": {}}\n' + line[:100])  # torn: the rest is on its way
            assert "no readings yet" in await words_after_look(app, pilot)
            with path.open("a") as file:
                file.write(line[100:] + "\n")
            assert "step 0 " in await words_after_look(app, pilot)
            write(tmp_path, readings)
            assert "step 1,500" in await words_after_look(app, pilot)
            path.unlink()  # a synced file is replaced
            assert "step 1,500" in await words_after_look(app, pilot)
            write(tmp_path, readings.readings[:3])
            assert "step 32 " in await words_after_look(app, pilot)
            with path.open("a") as file:
                file.write("hello\n")
            for _ in range(2):
                said = await words_after_look(app, pilot)
                assert "line 5 of" in said
                assert "step 32 " in said
            write(tmp_path, readings)
            said = await words_after_look(app, pilot)
            assert "step 1,500" in said
            assert "line 5 of" not in said
            assert not app.runs[0].look()  # nothing is new

    run(story)


def test_an_alert_is_shown_at_once_and_what_a_run_gave_up_is_not(make_readings, tmp_path):
    readings = make_readings(source="inline")

    async def story():
        async with watched(tmp_path) as (app, pilot):
            write(tmp_path, alerted(replace(readings, readings=[]), [(0, "not_finite")]))
            assert (
                "no readings yet Alert at step 0: not finite (layer 2)"
                in await words_after_look(app, pilot)
            )
            write(tmp_path, readings)
            assert "Alert at" not in await words_after_look(app, pilot)
            with (tmp_path / FILE_NAME).open("a") as file:
                file.write(raised_of("logit_growth", 1700).line() + "\n")
            said = await words_after_look(app, pilot)
            assert "Alert: logit growth at step 1,700. intrinsic dimension 5.3" in said
            assert sum(line.count("│") >= 2 for line in screen(app)) >= 6  # beyond the curve
            await pilot.press("t", "t", "t")
            assert "Alert at step 1,700: logit growth (layer 2)" in words(app)
            with (tmp_path / FILE_NAME).open("a") as file:
                file.write('{"run": {"rewound_to": 500}}\n')
            said = await words_after_look(app, pilot)  # before the first reading of the new branch
            assert "step 256 ·" in said
            assert "Alert at" not in said

    run(story)


@pytest.mark.parametrize(
    ("content", "stack", "said"),
    [("hello\n", None, "line 1 of"), ("", "encoder", "no stack is called 'encoder'")],
)
def test_what_is_no_record_ends_in_one_line(make_readings, tmp_path, content, stack, said):
    path = write(tmp_path, make_readings()) / FILE_NAME
    path.write_text(content + path.read_text())

    async def story():
        async with watched(tmp_path, stack=stack) as (app, _):
            pass
        assert said in app.return_value
        assert "\n" not in app.return_value
        assert app.return_code == 2

    run(story)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_files_are_looked_at_beside_the_keys_until_it_is_left(make_readings, tmp_path, key):
    """By a thread of its own: nothing but the number of pauses bounds how long it may take."""
    folder = write(tmp_path / "a", make_readings((0, 16)))

    async def story():
        app = WatchApp([Watched(folder, None, "a")], poll=0.001)
        async with app.run_test() as pilot:
            for title in ("─intrinsic dimension  2.8", "─intrinsic dimension  5.3"):
                for _ in range(5000):
                    await pilot.pause(0.002)
                    if title in text(app):
                        break
                assert title in text(app)
                write(folder, make_readings())
            await pilot.press(key)
            await pilot.pause()
            assert not app.is_running
        assert (app.return_value, app.return_code) == (None, 0)

    run(story)


def test_nothing_of_a_record_acts_on_the_terminal_or_on_the_markup(make_readings, tmp_path):
    odd = "\x1b[2J[bold]x[/nope]\u202e"
    values = {f"{odd}/mean": 1.0, f"{odd}/layer_01/head_0": 1.0}
    readings = [
        with_values(r, values, source=odd, mode=odd, notes=[odd]) for r in make_readings((0, 16))
    ]

    async def story():
        async with watched(write(tmp_path / "a[red]\x1b[2J", readings)) as (app, pilot):
            for _ in range(5):
                assert all(line.isprintable() for line in screen(app))
                assert "[bold]x[/nope]" in text(app)
                await pilot.press("m", "t")

    run(story)
