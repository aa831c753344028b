"""Data files for parameter-server applications, and generated data with a known answer.

A broken row is named by file, line and column.
"""

from pathlib import Path

import numpy as np

from agent.paramserver.tables import ApplicationError


def _number(kind, text, path, line, column):
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ApplicationError(
            f"{path}, line {line}, column {column}: {text!r} is not {what}"
        ) from None
    if not np.isfinite(value):
        raise ApplicationError(f"{path}, line {line}, column {column}: {text!r} is not finite")
    return value


def _fields(path, separator=None):
    """Yield the line's number, and its fields with the columns where they begin."""
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        at, found = 0, []
        for field in line.split(separator):
            at = line.index(field, at)
            found.append((field.strip(), at + 1))
            at += len(field)
        yield number, found


def triples(path, separator=","):
    """Return users, items and ratings of a file like Netflix's or MovieLens's."""
    users, items, ratings = [], [], []
    for line, fields in _fields(path, separator):
        if line == 1 and not fields[0][0].lstrip("-").isdigit():
            continue  # the names of the columns
        if len(fields) < 3:
            text = f"{len(fields)} fields, where user, item and rating are needed"
            raise ApplicationError(f"{path}, line {line}, column {fields[-1][1]}: {text}")
        users.append(_number(int, fields[0][0], path, line, fields[0][1]))
        items.append(_number(int, fields[1][0], path, line, fields[1][1]))
        ratings.append(_number(float, fields[2][0], path, line, fields[2][1]))
    return np.array(users), np.array(items), np.array(ratings)


def libsvm(path, width):
    """Return labels and dense rows of a file in libsvm's form: `label index:value ...`."""
    labels, rows = [], []
    for line, fields in _fields(path):
        labels.append(_number(int, fields[0][0], path, line, fields[0][1]))
        row = np.zeros(width)
        for text, column in fields[1:]:
            index, colon, value = text.partition(":")
            if not colon:
                raise ApplicationError(
                    f"{path}, line {line}, column {column}: {text!r} has no colon"
                )
            at = _number(int, index, path, line, column)
            if not 1 <= at <= width:
                wrong = f"index {at} is not in 1 to {width}"
                raise ApplicationError(f"{path}, line {line}, column {column}: {wrong}")
            row[at - 1] = _number(float, value, path, line, column + len(index) + 1)
        rows.append(row)
    return np.array(labels), np.array(rows)


def bag_of_words(path):
    """Return the documents and words of all tokens of a file of `document word count` rows."""
    documents, words = [], []
    for line, fields in _fields(path):
        if len(fields) == 1:
            continue  # the three numbers at the top of UCI's files
        if len(fields) != 3:
            text = f"{len(fields)} fields, where document, word and count are needed"
            raise ApplicationError(f"{path}, line {line}, column {fields[0][1]}: {text}")
        numbers = [_number(int, text, path, line, column) for text, column in fields]
        if min(numbers) < 1:
            raise ApplicationError(
                f"{path}, line {line}, column {fields[0][1]}: numbers begin at 1"
            )
        documents += [numbers[0] - 1] * numbers[2]
        words += [numbers[1] - 1] * numbers[2]
    return np.array(documents), np.array(words)


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
