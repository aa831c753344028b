"""Price histories as Parquet, small enough to write and read without a library.

One row group per pool, six columns: cloud, region, zone, type (text), at_s, value (doubles). The texts are
the same in every row of a group, so they are a dictionary of one entry; pages are deflated (gzip). Any
Parquet tool reads such a file; what is read here is what is written here, and anything else is
refused by name. The format is that of parquet-format 2.x: thrift's compact protocol, little endian.

Arrow would be 55 MB on every machine that boots with this package, for six columns.
"""

import gzip
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from bidding.errors import HistoryError
from bidding.history import POINTS_MAX, Series
from cloud.model import Pool

MAGIC = b"PAR1"
TEXTS, NUMBERS = ("cloud", "region", "zone", "type"), ("at_s", "value")
COLUMNS = (*TEXTS, *NUMBERS)
POOLS_MAX = 10_000
PAGE_BYTES_MAX = 64 << 20
DOUBLE, BYTE_ARRAY = 5, 6
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
DATA_PAGE, DICTIONARY_PAGE = 0, 2
GZIP, REQUIRED, UTF8 = 2, 0, 0
TRUE, FALSE, I32, I64, BINARY, LIST, STRUCT = 1, 2, 5, 6, 8, 9, 12  # types of the compact protocol

Value = int | bytes | list["Value"] | dict[int, "Value"]


class _Long(int):
    """An integer that the schema wants in 64 bits."""


# --- thrift, compact -----------------------------------------------------------------------------


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _zigzag(n: int) -> bytes:
    return _varint(n << 1 if n >= 0 else (-n << 1) - 1)


def _kind(value: Value) -> int:
    if isinstance(value, int):
        return I64 if isinstance(value, _Long) else I32
    return BINARY if isinstance(value, bytes) else LIST if isinstance(value, list) else STRUCT


def _encoded(value: Value) -> bytes:
    if isinstance(value, int):
        return _zigzag(value)
    if isinstance(value, bytes):
        return _varint(len(value)) + value
    if isinstance(value, list):
        kind = _kind(value[0])
        short = len(value) < 15
        head = bytes([(len(value) if short else 15) << 4 | kind])
        return head + (b"" if short else _varint(len(value))) + b"".join(map(_encoded, value))
    out, last = bytearray(), 0
    for number, part in sorted(value.items()):
        out.append((number - last) << 4 | _kind(part))
        out += _encoded(part)
        last = number
    return bytes(out) + b"\0"


class _Reader:
    """Reads values from bytes, never past their end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise HistoryError("a Parquet file ends in the middle of a value: it is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        n = shift = 0
        while True:
            byte = self.take(1)[0]
            n |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return n
            if shift > 63:
                raise HistoryError("a Parquet file holds a number of more than 64 bits")

    def value(self, kind: int, depth: int = 0) -> Value:
        if depth > 16:
            raise HistoryError("a Parquet file nests its own description too deeply")
        if kind in (TRUE, FALSE):
            return int(kind == TRUE)
        if kind in (3, 4, I32, I64):
            n = self.varint()
            return (n >> 1) ^ -(n & 1)
        if kind == BINARY:
            return self.take(self.varint())
        if kind == LIST:
            head = self.take(1)[0]
            count = head >> 4 if head >> 4 < 15 else self.varint()
            if count > len(self.data):
                raise HistoryError("a Parquet file holds a list that is longer than the file")
            return [self.value(head & 15, depth + 1) for _ in range(count)]
        if kind == STRUCT:
            return self.struct(depth + 1)
        raise HistoryError(f"a Parquet file holds a value of the unknown kind {kind}")

    def struct(self, depth: int = 0) -> dict[int, Value]:
        found: dict[int, Value] = {}
        last = 0
        while head := self.take(1)[0]:
            if head >> 4:
                last += head >> 4
            else:
                n = self.varint()
                last = (n >> 1) ^ -(n & 1)
            found[last] = self.value(head & 15, depth)
        return found


# --- writing -------------------------------------------------------------------------------------


def write(history: Mapping[Pool, Series]) -> bytes:
    """All pools as one file; of a pool with too many points the newest are kept."""
    if len(history) > POOLS_MAX:
        raise HistoryError(f"{len(history)} pools are more than the {POOLS_MAX} that are stored")
    out = bytearray(MAGIC)
    groups: list[Value] = []
    rows_in_all = 0
    for pool, series in sorted(history.items()):
        texts = (pool.cloud, pool.region, pool.zone, pool.type)
        at_s, value = series.at_s[-POINTS_MAX:], series.value[-POINTS_MAX:]
        chunks = [_text_chunk(out, n, t, len(at_s)) for n, t in zip(TEXTS, texts, strict=True)]
        chunks += [_number_chunk(out, n, v) for n, v in zip(NUMBERS, (at_s, value), strict=True)]
        sizes = sum(size for _, size in chunks)
        columns: list[Value] = [chunk for chunk, _ in chunks]
        groups.append({1: columns, 2: _Long(sizes), 3: _Long(len(at_s))})
        rows_in_all += len(at_s)
    footer: dict[int, Value] = {1: 2, 2: _schema(), 3: _Long(rows_in_all), 6: b"spot-orchestrator"}
    footer[4] = groups if groups else []
    data = _encoded(footer) if groups else _encoded_empty(footer)
    return bytes(out) + data + struct.pack("<I", len(data)) + MAGIC


def _encoded_empty(footer: dict[int, Value]) -> bytes:
    """A list without an element does not say of what it is: of structs."""
    head, tail = {k: v for k, v in footer.items() if k < 4}, {6: footer[6]}
    return _encoded(head)[:-1] + bytes([1 << 4 | LIST, STRUCT]) + b"\x28" + _encoded(tail)[1:]


def _schema() -> list[Value]:
    root: dict[int, Value] = {4: b"prices", 5: len(COLUMNS)}
    texts: list[Value] = [{1: BYTE_ARRAY, 3: REQUIRED, 4: n.encode(), 6: UTF8} for n in TEXTS]
    numbers: list[Value] = [{1: DOUBLE, 3: REQUIRED, 4: n.encode()} for n in NUMBERS]
    return [root, *texts, *numbers]


def _page(out: bytearray, kind: int, body: bytes, detail: dict[int, Value]) -> tuple[int, int]:
    """(bytes with the header as they are stored, and as they would be without deflation)."""
    packed = gzip.compress(body, 6, mtime=0)
    about = {DATA_PAGE: 5, DICTIONARY_PAGE: 7}[kind]
    header = _encoded({1: kind, 2: len(body), 3: len(packed), about: detail})
    out += header + packed
    return len(header) + len(packed), len(header) + len(body)


def _text_chunk(out: bytearray, name: str, text: str, rows: int) -> tuple[Value, int]:
    raw = text.encode()
    first = len(out)
    entry = struct.pack("<I", len(raw)) + raw
    a = _page(out, DICTIONARY_PAGE, entry, {1: 1, 2: PLAIN})
    at = len(out)
    runs = bytes([1]) + _varint(rows << 1) + b"\0"  # every row is entry 0
    detail: dict[int, Value] = {1: rows, 2: RLE_DICTIONARY, 3: RLE, 4: RLE}
    b = _page(out, DATA_PAGE, runs, detail)
    meta: dict[int, Value] = {
        1: BYTE_ARRAY, 2: [PLAIN, RLE, RLE_DICTIONARY], 3: [name.encode()], 4: GZIP, 5: _Long(rows),
        6: _Long(a[1] + b[1]), 7: _Long(a[0] + b[0]), 9: _Long(at), 11: _Long(first),
    }  # fmt: skip
    return {2: _Long(first), 3: meta}, a[1] + b[1]


def _number_chunk(out: bytearray, name: str, values: "np.ndarray") -> tuple[Value, int]:
    at = len(out)
    detail: dict[int, Value] = {1: len(values), 2: PLAIN, 3: RLE, 4: RLE}
    stored, whole = _page(out, DATA_PAGE, values.astype("<f8").tobytes(), detail)
    meta: dict[int, Value] = {
        1: DOUBLE, 2: [PLAIN, RLE], 3: [name.encode()], 4: GZIP, 5: _Long(len(values)),
        6: _Long(whole), 7: _Long(stored), 9: _Long(at),
    }  # fmt: skip
    return {2: _Long(at), 3: meta}, whole


# --- reading -------------------------------------------------------------------------------------


def read(data: bytes) -> dict[Pool, Series]:
    """What `write` has written; another Parquet file is refused with what it lacks."""
    if len(data) < 12 or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise HistoryError("not a Parquet file, or one that is cut off")
    (length,) = struct.unpack("<I", data[-8:-4])
    if length > len(data) - 12:
        raise HistoryError("a Parquet file whose description is longer than the file")
    try:
        footer = _Reader(data[len(data) - 8 - length : -8]).struct()
        groups = footer.get(4, [])
        assert isinstance(groups, list)
        found: dict[Pool, Series] = {}
        for group in groups[:POOLS_MAX]:
            pool, series = _group(data, group)
            found[pool] = series
    except (KeyError, TypeError, AssertionError, ValueError, zlib.error, EOFError, OSError) as e:
        raise HistoryError(f"a Parquet file that was not written here: {e!r}") from e
    return found


def _group(data: bytes, group: Value) -> tuple[Pool, Series]:
    assert isinstance(group, dict)
    chunks = group[1]
    assert isinstance(chunks, list)
    columns: dict[str, bytes] = {}
    for chunk in chunks:
        assert isinstance(chunk, dict)
        meta = chunk[3]
        assert isinstance(meta, dict)
        path, codec = meta[3], meta[4]
        assert isinstance(path, list)
        assert isinstance(path[0], bytes)
        if codec != GZIP:
            raise HistoryError("a Parquet file whose pages are not gzip; write it with gzip")
        first = meta.get(11, meta[9])
        assert isinstance(first, int)
        columns[path[0].decode()] = _body(data, first)
    if set(columns) != set(COLUMNS):
        raise HistoryError(
            f"a Parquet file with the columns {sorted(columns)}, not {sorted(COLUMNS)}"
        )
    names = [columns[n][4:].decode() for n in TEXTS]
    at_s, value = (np.frombuffer(columns[n], "<f8").astype(np.float64) for n in NUMBERS)
    return Pool(*names), Series(at_s=at_s, value=value)


def _body(data: bytes, at: int) -> bytes:
    """The first page of a column, inflated: the one text, or the numbers."""
    reader = _Reader(data, at)
    header = reader.struct()
    whole, packed = header[2], header[3]
    assert isinstance(whole, int)
    assert isinstance(packed, int)
    if not 0 <= whole <= PAGE_BYTES_MAX:
        raise HistoryError(f"a Parquet page of {whole} bytes; at most {PAGE_BYTES_MAX} are read")
    inflate = zlib.decompressobj(wbits=31)
    body = inflate.decompress(reader.take(packed), whole + 1)
    if len(body) != whole:
        raise HistoryError("a Parquet page that is not as long as it says")
    return body
