"""What stands above the charts."""

from tagged import with_values

from geomon.record import FILE_NAME
from geomon.show.terminal.choices import Choices
from geomon.show.terminal.headings import title_of_loss
from geomon.show.terminal.history import Watched


def test_the_loss_of_an_earlier_reading_says_at_which_step_it_was(make_readings, tmp_path):
    readings = list(make_readings((0, 1000, 1500)))
    for count, title in ((2, "training loss  2.5"), (3, "training loss  2.5 at step 1,000")):
        lines = [
            with_values(each, each.values | ({"training/loss": 2.5} if each.step < 1500 else {}))
            for each in readings[:count]
        ]
        (tmp_path / FILE_NAME).write_text("".join(f"{each.line()}\n" for each in lines))
        run = Watched(tmp_path)
        look = run.look()
        assert look is not None
        run.take(look)
        assert title_of_loss(Choices([run])).plain.strip() == title
