"""Draw the picture that moves in README: `python docs/site/moving.py`.

It is the figure of the run in docs/site/example.jsonl.xz as it grows from reading to reading, with
the axes of the last one.
"""

import io
import lzma
import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image

from geomon import read
from geomon.show import geometry_figure

HERE = Path(__file__).parent
MILLISECONDS, LAST, WIDTH, COLOURS = 350, 4000, 800, 96


def frames() -> list[Image.Image]:
    """Draw the run up to every second reading, from the third on."""
    with tempfile.TemporaryDirectory() as folder:
        content = lzma.decompress((HERE / "example.jsonl.xz").read_bytes())
        (Path(folder) / "readings.jsonl").write_bytes(content)
        readings = read(folder)
    last = geometry_figure(readings).axes
    drawn = []
    for end in range(3, len(readings) + 1, 2):
        figure = geometry_figure(replace(readings, readings=readings.readings[:end]))
        for axes, final in zip(figure.axes, last, strict=False):
            axes.set(xlim=final.get_xlim(), ylim=final.get_ylim())
            axes.set_xticks(final.get_xticks(), final.get_xticklabels())
            axes.set_xlim(final.get_xlim())
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        frame = Image.open(picture).convert("RGB")
        size = WIDTH, round(frame.height * WIDTH / frame.width)
        drawn.append(frame.resize(size, Image.Resampling.LANCZOS))
    colours = drawn[-1].quantize(COLOURS)
    return [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in drawn]


if __name__ == "__main__":
    first, *rest = frames()
    first.save(
        HERE.parent / "geometry.gif",
        save_all=True,
        append_images=rest,
        duration=[MILLISECONDS] * len(rest) + [LAST],
        loop=0,
        optimize=True,
    )
