"""Object storage (S3, Azure Blob, a folder) through obstore. No torch here.

obstore is imported when the first object store is opened, so nothing else needs it. Its retries are
used, bounded here: 5xx answers and broken connections are tried again with growing pauses, and what
still fails is `Unavailable`. After a conditional create whose answer was lost, a retry may find the
file there already; then `Archive.commit` finds out that the file is from its first try.
"""

import importlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agent.checksum import Buffer
from agent.errors import CheckpointError
from agent.store.errors import Damaged, Full, Unavailable
from agent.store.places.sinks import DiskSink, Read, Sink, check_key

RETRIES_MAX = 8
RETRY_S_MAX = 60.0
REQUEST_S_MAX = 60.0
PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
AT_ONCE = 12  # pieces of 5 MiB of one file on their way: obstore's own choice
TIMED_OUT = "kind: Timeout"  # in what the library says of an error's source
FILE = re.compile(r"file:(//[^/]*)?")
_REQUEST = re.compile(r"Error performing [A-Z]+ (\w+://[^/\s]+)\S* in .*? - (.*)", re.DOTALL)
_ANSWER = re.compile(r"Server returned non-2xx status code: ([^:]*)")
_REASON = re.compile(r"<(Code|Message)>([^<]+)<")
BEHIND = re.compile(r"[?#]")
SCHEMES = ("s3", "s3a", "az", "abfs", "abfss", "azure", "adl", "gs")


class Retries:
    """How long one request may be tried: class attributes, so that a test can shorten them."""

    count_max = RETRIES_MAX
    total_s_max = RETRY_S_MAX
    pause_s = PAUSE_S
    pause_s_max = PAUSE_S_MAX

    @classmethod
    def config(cls) -> dict[str, Any]:
        return {
            "max_retries": cls.count_max,
            "retry_timeout": timedelta(seconds=cls.total_s_max),
            "backoff": {
                "init_backoff": timedelta(seconds=cls.pause_s),
                "max_backoff": timedelta(seconds=cls.pause_s_max),
                "base": 2,
            },
        }


def open_sink(place: str, **options: Any) -> Sink:
    """Open the sink at a path or URI: a folder, `s3://bucket/prefix`, `az://container/prefix`."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return DiskSink(Path(unquote(FILE.sub("", place))))
    if not parts.scheme:  # in a folder's name, `#`, `?` and `%` are ordinary characters
        return DiskSink(Path(place))
    if parts.scheme not in SCHEMES:
        raise Unavailable(f"{place}: give a folder or {', '.join(SCHEMES[:4])}, gs://...")
    if mark := BEHIND.search(place):
        # The library leaves out what follows, a job's name too, so all jobs would write to one place.
        raise Unavailable(
            f"{place[: mark.start()]}: the address of a store ends before {mark[0]}, and keys come "
            "from the environment"
        )
    store = _obstore("obstore.store").from_url(
        place,
        retry_config=Retries.config(),
        # These override client options from the environment. An `http://` endpoint is deliberate.
        client_options={"timeout": timedelta(seconds=REQUEST_S_MAX), "allow_http": True},
        **options,
    )
    return ObjectSink(store, place)


def open_place(place: str) -> Sink:
    """Open the sink at a path or URI; raise `CheckpointError` for whatever prevents it."""
    try:
        return open_sink(place)
    except CheckpointError:
        raise
    except Exception as error:  # the edge to a store's own library, which has errors of many kinds
        raise CheckpointError(f"{place} cannot be opened: {error}") from error


def _obstore(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(
            "object storage needs the package obstore: run pip install 'obstore==0.12.1'"
        ) from error


def _in_a_line(error: str) -> str:
    """Return which host gave what answer.

    The library adds how it asked, and breaks the line where a store gives its reason.
    """
    error = error.partition("\n\nDebug source")[0]
    asked = _REQUEST.search(error)
    if asked is None:
        return error.splitlines()[0]
    host, said = asked.groups()
    answer = _ANSWER.search(said)
    if answer is None:
        return f"{host} does not answer: {said.splitlines()[0]}"
    reasons = [words for _, words in _REASON.findall(said)]
    return f"{host} answers {': '.join((answer[1], *reasons))}"


class ObjectSink:
    """Files in an object store. Every operation is one request, or a few for a large file."""

    span_bytes = 1 << 23  # a request costs a round trip, whatever it brings

    def __init__(self, store: Any, name: str) -> None:
        self.name = name
        self._store = store
        self._obstore = _obstore("obstore")
        self._at_once = AT_ONCE

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        whole = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        with self._mapped(key):
            try:
                self._put(key, whole)
            except self._obstore.exceptions.GenericError as error:
                if TIMED_OUT not in str(error) or self._at_once == 1:
                    raise
                # Requests that share a slow link each take as long as all of them together.
                self._at_once = 1
                self._put(key, whole)

    def _put(self, key: str, whole: list[memoryview]) -> None:
        self._obstore.put(self._store, check_key(key), whole, max_concurrency=self._at_once)

    def settle(self) -> None:
        """Do nothing, because a put is answered only when it is safe."""

    def create(self, key: str, data: bytes) -> bool:
        """Create a file. Return False if it is there already.

        409 and 412 are one error here. Of several simultaneous callers each may get 409 although
        none has succeeded, so a file that is said to be there is looked for.
        """
        for attempt in range(Retries.count_max):
            with self._mapped(key):
                try:
                    self._obstore.put(self._store, check_key(key), data, mode="create")
                except self._obstore.exceptions.AlreadyExistsError:
                    if self._is_there(key):
                        return False
                else:
                    return True
            time.sleep(min(Retries.pause_s * 2**attempt, Retries.pause_s_max))
        raise Unavailable(f"{self.name}/{key}: the store says that it is there, and it is not")

    @contextmanager
    def open(self, key: str) -> Iterator[Read]:
        check_key(key)

        def read(offset: int, views: list[memoryview]) -> None:
            wanted = sum(view.nbytes for view in views)
            if not wanted:
                return
            with self._mapped(key):
                try:
                    data = self._range(key, offset, offset + wanted)
                except self._obstore.exceptions.GenericError:
                    if self._length(key) >= offset + wanted:
                        raise
                    data = memoryview(b"")
            if data.nbytes != wanted:
                raise Damaged(f"{self.name}/{key} ends before byte {offset + wanted}")
            at = 0
            for view in views:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

        yield read

    def _range(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(self._obstore.get_range(self._store, key, start=start, end=end))

    def _is_there(self, key: str) -> bool:
        try:
            return self._length(key) >= 0
        except FileNotFoundError:
            return False

    def _length(self, key: str) -> int:
        return int(self._obstore.head(self._store, key)["size"])

    def get(self, key: str) -> bytes:
        with self._mapped(key):
            return bytes(self._obstore.get(self._store, check_key(key)).bytes())

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the files of a folder. That there are none is believed when it is said twice.

        A store may answer 200 with an error, which the library reads as a list of nothing. A job
        would begin anew, and parts be deleted that a manifest names.
        """
        return self._listed(prefix) or self._listed(prefix)

    def _listed(self, prefix: str) -> dict[str, int]:
        with self._mapped(prefix):
            pages = self._obstore.list(self._store, check_key(prefix))
            return {item["path"]: int(item["size"]) for page in pages for item in page}

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._mapped(key):
                try:
                    self._obstore.delete(self._store, check_key(key))
                except FileNotFoundError:
                    continue

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        where = f"{self.name}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            # What stands before a store that restarts says so of everything, and a version of which
            # something is missing would be deleted.
            folder, inside, _ = key.rpartition("/")
            if inside and key in self.sizes(folder):
                raise Unavailable(f"{where} is said to be missing, and is listed") from error
            raise Damaged(f"{where} is missing") from error
        except (self._obstore.exceptions.BaseError, OSError) as error:
            what = f"{where}: {_in_a_line(str(error))}"
            raise (Full(what) if "No space left" in what else Unavailable(what)) from error
