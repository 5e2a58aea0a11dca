"""Every note of the package has a kind of the one table of kinds, and every kind is made."""

import ast
from pathlib import Path

import msgspec
import pytest

from geomon.note import Note
from geomon.note_kinds import NoteKind

PACKAGE = Path(__file__).parent.parent / "geomon"
TREES = {
    path: ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
    if path.name != "note_kinds.py"
}


def test_no_note_is_made_with_a_kind_of_its_own():
    made = [
        (path.name, node.lineno, ast.unparse(node.args[0]))
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Note"
    ]
    assert len(made) > 40
    of_alerts = [each for each in made if each[0] == "alerts.py"]
    texts = [each for each in made if each not in of_alerts and each[2][:1] in "\"'f"]
    assert not texts


def test_every_kind_is_named_in_the_code():
    named = {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "NoteKind"
    }
    assert named == set(NoteKind.__members__)


@pytest.mark.parametrize("kind", NoteKind)
def test_a_kind_says_what_it_means_and_what_to_do(kind):
    assert kind.meaning.endswith(".")
    assert not kind.meaning[0].islower()
    assert kind.to_do.endswith(".")
    assert not kind.to_do[0].islower()
    assert kind.values
    assert not kind.values.endswith(".")


def test_a_note_of_a_record_equals_the_note_that_was_written():
    note = Note(NoteKind.PADDING, "half is padding", "encoder", about="mask")
    read = msgspec.json.decode(msgspec.json.encode(note), type=Note)
    assert read == note
    assert read.kind == "padding"


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"text": "a third is padding"}, True),
        ({"layers": (3,)}, True),
        ({"kind": NoteKind.PACKED}, False),
        ({"stack": "decoder"}, False),
        ({"about": "key_padding_mask"}, False),
    ],
)
def test_notes_are_one_if_stack_kind_and_subject_are(other, is_same):
    note = Note(NoteKind.PADDING, "half is padding", "encoder", about="mask")
    assert (msgspec.structs.replace(note, **other).key == note.key) is is_same
