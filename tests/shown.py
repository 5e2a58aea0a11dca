"""Synthetic runs for tests of pages: on disk, and with alerts."""

import json

from tagged import TEXTS, alert_of, with_values

from geomon.record import FILE_NAME, Readings, read


def write(folder, readings, arrays=None, **description):
    """Write a record, with arrays by name and layer where a function of a reading gives them."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"run": {"model": "Synthetic", "metrics": TEXTS, **description}}
    lines = [json.dumps(run), *(reading.line() for reading in readings)]
    (folder / FILE_NAME).write_text("\n".join(lines) + "\n")
    run = read(folder)
    for reading in readings if arrays is not None else ():
        run.folder.write(reading.step, reading.source, arrays(reading))
    return folder


def alerted(readings, alerts):
    """The same run with alerts: kinds, with the place of their reading."""
    changed = list(readings)
    for place, kind in alerts:
        words = f"{kind.replace('_', ' ')} (layer 2): look there (geomon alerts {kind})"
        notes = (*changed[place].notes, alert_of(kind, words))
        changed[place] = with_values(changed[place], changed[place].values, notes=notes)
    return Readings(readings.runs, changed)
