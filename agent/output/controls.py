"""Text that scripts make, and that a terminal or a page may show. No torch here.

A terminal obeys what is in its text: escape sequences move the cursor, set titles and fill the
clipboard, and controls of direction show a line as another one than it is.
"""

import re

COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# Controls of C0 but for tab and newline, of C1, of direction, ends of lines and paragraphs, and
# halves of characters, which cannot be encoded.
HARMFUL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """Return the text with each control written out as in Python; colours are left out."""
    if text.isprintable():
        return text
    return HARMFUL.sub(_written_out, COLOURS.sub("", text))


def harmless_json(document: str) -> str:
    """Return the same JSON document, in which each control in a string is written as `\\uXXXX`."""
    return HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
