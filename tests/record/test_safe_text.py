from hypothesis import given
from hypothesis import strategies as st

from geomon.record.safe_text import printable


@given(st.text())
def test_printable_text_has_one_line_and_acts_on_nothing(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert shown.isprintable()
    assert printable(shown) == shown


def test_words_stay_and_breaks_become_spaces():
    assert printable("blocks.0 · ±1 日本語") == "blocks.0 · ±1 日本語"
    assert printable("a\nb\r\nc\td\u2028e\xa0f") == "a b  c d e f"
    assert printable("\x1b[2J\u202eabc\x9b") == "\ufffd[2J\ufffdabc\ufffd"
