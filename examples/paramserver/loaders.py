"""Data files for parameter-server applications, and generated data with a known answer.

A file may be packed by gzip. A broken row is named by file, line and column, and nothing is left out.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

from agent.paramserver.tables import ApplicationError

TOKENS_MAX = 10**9
SHOWN_MAX = 200  # letters of what is wrong


def _wrong(path, line, column, what):
    """Return the error of a place; a damaged line may be one field of any length."""
    if len(what) > SHOWN_MAX:
        what = f"{what[: SHOWN_MAX // 2]} ... {what[-SHOWN_MAX // 2 :]}"
    return ApplicationError(f"{path}, line {line}, column {column}: {what}")


def _parsed(kind, text):
    """Return a number in plain digits, or raise `ValueError`; Python would take others as well."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return kind(text)


def _number(kind, field, path, line, least=-(2**63)):
    text, column = field
    try:
        value = _parsed(kind, text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise _wrong(path, line, column, f"{text!r} is not {what}") from None
    if kind is float and not np.isfinite(value):
        raise _wrong(path, line, column, f"{text!r} is not finite")
    if kind is int and not least <= value < 2**63:
        raise _wrong(path, line, column, f"{text} is not from {least} to {2**63 - 1}")
    return value


def _is_name(text):
    """Return whether a field is the name of a column, and not a broken number."""
    try:
        _parsed(float, text)
    except ValueError:
        return any(letter.isalpha() for letter in text)
    return False


def _lines(path):
    """Yield the lines with their numbers; bytes that are no text are left to be named."""
    number = 0
    try:
        with Path(path).open("rb") as file:
            opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
        with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ApplicationError(f"{path} cannot be read beyond line {number}: {error}") from error


def _fields(path, separator=None):
    """Yield the line's number, and its fields with the columns where they begin."""
    for number, line in _lines(path):
        if not line.strip() or line.startswith("#"):
            continue
        at, found = 0, []
        for field in line.split(separator):
            at = line.index(field, at)
            found.append((field.strip(), at + 1 + len(field) - len(field.lstrip())))
            at += len(field) + len(separator or "")
        yield number, found


def _arrays(path, *columns):
    if not columns[0]:
        raise ApplicationError(f"{path} has no rows")
    return tuple(np.array(column) for column in columns)


def triples(path, separator=","):
    """Return users, items and ratings of a file like Netflix's or MovieLens's."""
    users, items, ratings = [], [], []
    is_first = True
    for line, fields in _fields(path, separator):
        was_first, is_first = is_first, False
        if was_first and all(_is_name(text) for text, _ in fields):
            continue
        if len(fields) < 3:
            what = f"{len(fields)} fields, where user, item and rating are needed"
            raise _wrong(path, line, fields[-1][1], what)
        users.append(_number(int, fields[0], path, line, least=0))
        items.append(_number(int, fields[1], path, line, least=0))
        ratings.append(_number(float, fields[2], path, line))
    return _arrays(path, users, items, ratings)


def libsvm(path, width):
    """Return labels and dense rows of a file in libsvm's form: `label index:value ... # note`."""
    labels, rows = [], []
    for line, fields in _fields(path):
        labels.append(_number(int, fields[0], path, line))
        row, seen = np.zeros(width), set()
        for text, column in fields[1:]:
            if text.startswith("#"):
                break
            index, colon, value = text.partition(":")
            if not colon:
                raise _wrong(path, line, column, f"{text!r} has no colon")
            at = _number(int, (index, column), path, line)
            if not 1 <= at <= width:
                raise _wrong(path, line, column, f"index {at} is not in 1 to {width}")
            if at in seen:
                raise _wrong(path, line, column, f"index {at} is there for the second time")
            seen.add(at)
            row[at - 1] = _number(float, (value, column + len(index) + 1), path, line)
        rows.append(row)
    return _arrays(path, labels, rows)


def bag_of_words(path):
    """Return the documents and words of all tokens of a file of `document word count` rows.

    UCI's files begin with the numbers of documents, words and rows, one on a line.
    """
    top, found = [], []
    tokens = 0
    for line, fields in _fields(path):
        if len(fields) == 1 and len(top) < 3 and not found:
            top.append(_number(int, fields[0], path, line, least=1))
            continue
        if len(top) in {1, 2}:
            what = f"{len(top)} of the 3 numbers that the file begins with came before the rows"
            raise _wrong(path, line, fields[0][1], what)
        if len(fields) != 3:
            what = f"{len(fields)} fields, where document, word and count are needed"
            raise _wrong(path, line, fields[0][1], what)
        row = [_number(int, field, path, line, least=1) for field in fields]
        for number, most, (_, column) in zip(row, top[:2], fields, strict=False):
            if number > most:
                raise _wrong(path, line, column, f"{number} is beyond the {most} at the top")
        tokens += row[2]
        if tokens > TOKENS_MAX:
            raise _wrong(path, line, fields[2][1], f"more than {TOKENS_MAX} tokens up to here")
        found.append(row)
    if top[2:] and len(found) != top[2]:
        raise ApplicationError(f"{path} has {len(found)} rows, and says {top[2]} at the top")
    (rows,) = _arrays(path, found)
    return tuple(np.repeat(rows[:, at] - 1, rows[:, 2]) for at in (0, 1))


def ratings(users, items, count, rank=4, noise=0.0, seed=1):
    """Generate ratings of a matrix of low rank: its error can go down to the noise."""
    draw = np.random.default_rng(seed)
    left, right = draw.normal(size=(users, rank)), draw.normal(size=(items, rank))
    who, what = draw.integers(0, users, count), draw.integers(0, items, count)
    values = np.einsum("ij,ij->i", left[who], right[what]) / np.sqrt(rank)
    order = np.argsort(who, kind="stable")
    values += noise * draw.normal(size=count)
    return who[order], what[order], values[order]


def classes(count, width, kinds, seed=1):
    """Generate points whose class is the largest of linear scores."""
    draw = np.random.default_rng(seed)
    points, weights = draw.normal(size=(count, width)), draw.normal(size=(kinds, width))
    return (points @ weights.T).argmax(1), points


def rings(count, kinds, seed=1):
    """Generate points of a plane in rings around one centre, and the ring of each."""
    draw = np.random.default_rng(seed)
    ring = np.arange(count) % kinds
    angle, far = draw.uniform(0, 2 * np.pi, count), ring + 0.5 + 0.1 * draw.normal(size=count)
    points = np.stack([np.cos(angle), np.sin(angle)], 1) * far[:, None]
    return ring, points.astype(np.float32)


def clouds(count, width, kinds, seed=1):
    """Generate points around centres that are far apart, and the centres."""
    draw = np.random.default_rng(seed)
    centres = draw.permutation(kinds * 4).reshape(kinds, 4)[:, :1] * 10.0
    centres = centres + draw.normal(size=(kinds, width))
    which = np.arange(count) % kinds
    return centres[which] + 0.1 * draw.normal(size=(count, width)), centres


def topics(documents, words, length, kinds, seed=1):
    """Generate documents of one topic each; topics have words that differ."""
    draw = np.random.default_rng(seed)
    each = words // kinds
    of_document = np.arange(documents) % kinds
    which = np.repeat(np.arange(documents), length)
    return which, of_document[which] * each + draw.integers(0, each, documents * length)
