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


# Opening and sentence; the line of at most 100 characters, and the rest. A line is cut at a space.
LINES = [
    ("", "x" * 100, "x" * 100, "more"),
    ("", "x" * 101, "x" * 96 + " ...", "... xxxxx; more"),
    ("", "x" * 96 + " yyyy", "x" * 96 + " ...", "... yyyy; more"),
    ("", "x" * 97 + " yyyy", "x" * 96 + " ...", "... x yyyy; more"),
    ("at: ", "x" * 101, "at: " + "x" * 92 + " ...", "... xxxxxxxxx; more"),
    ("at: ", "x " + "y" * 99, "at: x ...", f"... {'y' * 99}; more"),
    ("at: ", "x" * 96, "at: " + "x" * 96, "more"),
]


@pytest.mark.parametrize(("opening", "text", "line", "more"), LINES)
def test_the_line_of_a_note_has_a_hundred_characters_at_most(opening, text, line, more):
    note = Note("a", text, more="more")
    assert note.lines(opening) == (line, more)
    assert note.words() == f"{text}; more"
    assert len(line) <= 100
    of_stack = msgspec.structs.replace(note, stack=text[:1], text=text[3:], more="")
    assert of_stack.words() == f"{text[:1]}: {text[3:]}"


def test_a_note_is_plain_unless_it_says_otherwise():
    note = Note("a", "{n} rows{where}", layers=(1, 12), numbers={"n": 3})
    assert (note.is_error, note.is_odd, note.is_alert) == (False, False, False)
    assert Note("a", "b", advice="c").is_alert
    assert note.words() == "3 rows, layer 1, 12"
    assert Note("a", "{n} rows{where}", layers=(1, 12)).words() == "{n} rows{where}"
    assert Note("a", "rows{where}", layers=(1, 12)).words() == "rows, layer 1, 12"
    assert Note("a", "{n} rows", numbers={"n": 3}).words() == "3 rows"
    assert Note("a", "{n} rows").words() == "{n} rows"
