"""Offline runs of W&B: how they are started in a test, and their history as left on disk."""

import struct
import time
from pathlib import Path


class Run:
    """The counting of W&B: what is logged below the counter is dropped."""

    def __init__(self):
        self.rows, self.metrics, self.dropped, self.step, self._row = [], {}, [], 0, {}
        self.summary, self.alerts, self.config = {}, [], {}

    def define_metric(self, name, step_metric=None, hidden=None):
        self.metrics[name] = step_metric, hidden

    def alert(self, **given):
        self.alerts.append(given)

    def log(self, row, step=None, commit=None):
        self._log(row, step, commit)

    def _log(self, row, step=None, commit=None):
        if step is not None and step < self.step:
            self.dropped.append(row)
            return
        if step is not None and step > self.step:
            self.end_row()
            self.step = step
        self._row |= row
        if commit or (commit is None and step is None):
            self.end_row()
            self.step += 1

    def end_row(self):
        if self._row:
            self.rows.append(self._row)
        self._row = {}


def work_offline(monkeypatch, folder):
    """Have W&B write to a folder, whatever runs this process has had before."""
    import wandb

    wandb.teardown()  # its settings are read once in a process
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(folder))):
        monkeypatch.setenv(f"WANDB_{name}", value)


def wandb_rows(folder):
    """Read the rows of the history of the run in the folder, once its last record is on disk."""
    return [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in wandb_records(folder)
        if record.HasField("history")
    ]


def wandb_records(folder):
    """Read all records of the run in the folder, once its last one is on disk.

    W&B's own process writes the file, and may be a moment behind the run's `finish`.
    """
    path = next(Path(folder).rglob("run-*.wandb"))
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            records = list(_records(path.read_bytes()))
        except ValueError:  # cut in the middle of one
            records = []
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end")


def _records(content):
    """Read the records of a log in blocks of 32 KiB, the format of LevelDB."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    place, whole = 7, b""
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()
            try:
                record.ParseFromString(whole)
            except DecodeError as error:
                raise ValueError("torn") from error
            whole = b""
            yield record
