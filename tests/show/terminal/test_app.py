"""The application of `geomon watch`, by textual's pilot: no terminal, no clock, no waiting."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from tagged import TEXTS, alert_of, with_values

from geomon.record import FILE_NAME
from geomon.show.terminal.app import WatchApp
from geomon.show.terminal.history import Watched


def write(folder, readings, *, start="", end=""):
    """Write a record, and return its folder."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"run": {"model": "Synthetic", "metrics": TEXTS}}),
        *(r.line() for r in readings),
    ]
    (folder / FILE_NAME).write_text(start + "\n".join(lines) + "\n" + end)
    return folder


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


def run(story):
    asyncio.run(story())


@pytest.mark.parametrize("size", [(40, 14), (80, 24), (200, 50)])
def test_a_run_is_shown_at_any_size(make_readings, tmp_path, size):
    folder = write(tmp_path / "a", make_readings(layers=12, heads=16, notes=["a long note " * 30]))

    async def story():
        async with watched(folder, size=size) as (app, _):
            shown = screen(app)
            assert len(shown) == size[1]
            words = "\n".join(shown)
            assert "step 1,500" in words
            assert "intrinsic dimension 5.3 ± 0.1" in words
            assert "a long note" in words
            assert "q quit" in shown[-1]
            assert "? help" in shown[-1]
            whole = size[0] >= 72
            assert ("by layer" in words) == whole
            assert ("heads: attention entropy" in words) == whole
            assert "⠒" in words or "⠤" in words or "⠉" in words  # a curve
            if size[0] > 100:
                assert "compressing since step 256, 28 % below its peak 7.4" in words

    run(story)


def test_keys_change_what_is_shown(make_readings, tmp_path):
    folder = write(tmp_path / "a", make_readings())

    async def story():
        async with watched(folder, size=(120, 30)) as (app, pilot):
            assert "intrinsic dimension  5.3 ± 0.1  log steps" in text(app)
            assert "by layer not measured" in text(app)
            await pilot.press("x", "m")
            assert "intrinsic dimension, distinct tokens  " in text(app)
            assert "linear steps" in text(app)
            await pilot.press("m", "m")
            assert "anisotropy, layer 0" in text(app)  # it has no mean
            await pilot.press("l", "l")
            assert "anisotropy, layer 2" in text(app)
            await pilot.press("L", "L", "L")
            assert "anisotropy, layer 4" in text(app)
            await pilot.press("M", "m", "h")
            assert "heads: cosine of mean query and mean key" in text(app)
            await pilot.press("left")
            assert "━step 1,024" in text(app)
            await pilot.press("right")
            assert "━now" in text(app)
            await pilot.press(*["left"] * 20)
            assert app.choices.step == 0
            await pilot.press("end", "tab")
            assert "by layer" not in text(app)
            await pilot.press("tab")
            assert "by layer ━now ━peak 256 ━start" in text(app)

    run(story)


def test_a_reading_that_is_chosen_is_that_of_the_heads(make_readings, tmp_path):
    readings = make_readings(heads=2, layers=2)
    folder = write(tmp_path / "a", readings)

    async def story():
        async with watched(folder) as (app, pilot):
            shown = []
            for _ in range(2):
                tag = "attention_entropy/layer_01/head_0"
                value = app.choices.reading.values[tag]
                assert f" {value:.1f} " in text(app)
                shown.append(value)
                await pilot.press("left", "left", "left", "left", "left", "left")
            assert shown[0] != shown[1]

    run(story)


def test_several_runs_lie_over_one_another_with_a_legend(make_readings, tmp_path):
    one = write(tmp_path / "one", make_readings())
    other = write(tmp_path / "other", make_readings((0, 16, 32, 64), notes=["of the other"]))

    async def story():
        async with watched(one, other, tmp_path / "third") as (app, pilot):
            lines = screen(app)
            await pilot.press("m", "m", "m")
            assert lines[0].startswith(" ▸━━ one  step 1,500")
            assert "dimension 5.3 ± 0.1, compressing since step 256" in lines[0]
            assert lines[1].startswith("  ━━ other  step 64")
            assert "waiting for" in lines[2]
            assert "by layer ━one ━other" in text(app)
            assert "of the other" not in text(app)
            await pilot.press("r")
            assert "of the other" in text(app)
            write(tmp_path / "third", make_readings())
            app.look()
            await pilot.pause()
            assert "third  step 1,500" in screen(app)[2]

    run(story)


def test_a_record_is_followed_while_it_is_written(make_readings, tmp_path):
    readings = make_readings()
    path = tmp_path / FILE_NAME

    async def story():
        async with watched(tmp_path) as (app, pilot):

            async def shown():
                app.look()
                await pilot.pause()
                return text(app)

            assert f"waiting for {path}"[:60] in await shown()
            path.write_text('{"run": {}}\n')
            assert "no readings yet" in await shown()
            line = readings[0].line()
            path.write_text('{"run": {}}\n' + line[:100])  # torn: the rest is on its way
            assert "no readings yet" in await shown()
            with path.open("a") as file:
                file.write(line[100:] + "\n")
            assert "step 0" in await shown()
            write(tmp_path, readings)
            assert "step 1,500" in await shown()
            path.unlink()  # a synced file is replaced
            assert "step 1,500" in await shown()
            write(tmp_path, readings.readings[:3])
            assert "step 32 " in await shown()
            with path.open("a") as file:
                file.write("hello\n")
            words = await shown()
            assert "line 5 of" in words
            assert "step 32 " in words
            write(tmp_path, readings)
            words = await shown()
            assert "step 1,500" in words
            assert "line 5 of" not in words

    run(story)


@pytest.mark.parametrize(
    ("content", "stack", "words"),
    [("hello\n", None, "line 1 of"), ("", "encoder", "no stack is called 'encoder'")],
)
def test_what_is_no_record_ends_in_one_line(make_readings, tmp_path, content, stack, words):
    write(tmp_path, make_readings(), start=content)

    async def story():
        app = WatchApp([Watched(tmp_path, stack, "a")], poll=None)
        async with app.run_test() as pilot:
            app.look()
            await pilot.pause()
        assert words in app.return_value
        assert "\n" not in app.return_value
        assert app.return_code == 2

    run(story)


def test_two_runs_in_one_record_and_other_metrics_are_said(make_readings, tmp_path):
    only = [r for r in make_readings((0, 64)).readings for _ in range(2)]
    other = [with_values(r, {"peak_norm/mean": 1.0 + r.step}) for r in only]

    async def story():
        async with watched(write(tmp_path, other)) as (app, pilot):
            words = text(app)
            assert "two runs wrote into this record" in words
            assert "peak_norm  65.0" in words
            assert "intrinsic dimension: not measured" in words
            assert "heads" not in words.replace("h heads", "")
            for key in ("m", "l", "h", "r", "left", "x", "tab", "tab", "tab", "n", "escape"):
                await pilot.press(key)
            assert app.is_running

    run(story)


def test_alerts_and_notes_come_newest_first_and_whole_on_a_page(make_readings, tmp_path):
    notes = ["a note of the run " * 9, alert_of("entropy_collapse", "entropy collapse: 0 nats")]
    readings = make_readings((0, 16, 32), notes=notes).readings

    async def story():
        async with watched(write(tmp_path, readings), size=(80, 30)) as (app, pilot):
            first = next(line for line in screen(app) if "alert at step" in line)
            assert "alert at step 32" in first
            assert "[n: 1 more]" in text(app)
            await pilot.press("n")
            page = " ".join(text(app).replace("│", " ").split())
            assert page.count("a note of the run") == 9
            assert all(f"alert at step {step}:" in page for step in (0, 16, 32))
            await pilot.press("escape", "question_mark")
            assert "next or previous metric" in text(app)
            await pilot.press("q")
            assert "next or previous metric" not in text(app)

    run(story)


def test_files_are_looked_at_beside_the_keys(make_readings, tmp_path):
    """By a thread of its own: nothing but the number of pauses bounds how long it may take."""
    folder = write(tmp_path / "a", make_readings((0, 16)))

    async def story():
        app = WatchApp([Watched(folder, None, "a")], poll=0.001)
        async with app.run_test() as pilot:
            for step in ("step 16", "step 1,500"):
                for _ in range(5000):
                    await pilot.pause(0.002)
                    if step in text(app):
                        break
                assert step in text(app)
                write(folder, make_readings())

    run(story)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_it_is_left_by_q_and_ctrl_c(make_readings, tmp_path, key):
    async def story():
        app = WatchApp([Watched(write(tmp_path, make_readings()), None, "a")], poll=0.001)
        async with app.run_test() as pilot:
            await pilot.press(key)
            await pilot.pause()
            assert not app.is_running
        assert (app.return_value, app.return_code) == (None, 0)

    run(story)


def test_without_colours_runs_and_heads_differ_by_their_characters(
    make_readings, tmp_path, monkeypatch
):
    monkeypatch.setenv("NO_COLOR", "1")
    one = write(tmp_path / "one", make_readings(heads=8, layers=12))
    other = write(tmp_path / "other", make_readings((0, 16, 32, 64)))

    async def story():
        async with watched(one, other) as (app, pilot):
            await pilot.press("m", "m", "m", "h")
            assert "by layer ━one •other" in text(app)
            words = text(app)
            assert "▲" in words

    run(story)


def test_nothing_of_a_record_acts_on_the_terminal_or_on_the_markup(make_readings, tmp_path):
    odd = "\x1b[2J[bold]x[/nope]\u202e"
    folder = tmp_path / "a[red]\x1b[2J"
    readings = [
        with_values(
            r, {f"{odd}/mean": 1.0, f"{odd}/layer_01/head_0": 1.0}, source=odd, mode=odd,
            notes=[odd],
        )
        for r in make_readings((0, 16))
    ]  # fmt: skip

    async def story():
        async with watched(write(folder, readings)) as (app, pilot):
            for _ in range(4):
                assert all(line.isprintable() for line in screen(app))
                assert "[bold]x[/nope]" in text(app)
                await pilot.press("m")

    run(story)
