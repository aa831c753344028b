"""A small real object store on loopback, speaking as much of S3's language as our sink uses.

Faults are scripted: the next n requests are refused, or are performed and their answer is lost or breaks off.
"""

import select
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from agent.store.places.objects import open_sink

HOST = "127.0.0.1"


def s3_sink(server):
    """Our sink, in the bucket of this server."""
    return open_sink(
        "s3://bucket",
        endpoint=server.endpoint,
        access_key_id="none",
        secret_access_key="none",
        region="us-east-1",
        virtual_hosted_style_request=False,
    )


class S3Server:
    """`with S3Server() as server:` serves one bucket until the block ends."""

    def __init__(self):
        self.files = {}
        self.uploads = {}
        self.lock = threading.RLock()
        self.refusal = 503
        self.refuse = 0  # so many requests more are refused,
        self.spare = 0  # once so many have been answered well
        self.lose = 0  # so many writes more are performed, and answered 503
        self.conflicts = 0  # so many conditional writes more are answered 409, and not performed
        self.cut = 0  # so many answers more with content end in the middle of it
        self.narrow = False  # of several pieces of an upload on their way none arrives in time
        self.on_their_way = 0
        self.requests = 0
        self.bytes_out = 0
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._http = ThreadingHTTPServer((HOST, 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    @property
    def endpoint(self):
        return f"http://{HOST}:{self._http.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # head and body in one piece
    server_state = None

    def log_message(self, *_):
        """Nobody reads it."""

    def _begin(self):
        state = self.server_state
        url = urlsplit(self.path)
        self.key = unquote(url.path).split("/", 2)[2] if url.path.count("/") > 1 else ""
        self.query = {
            key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
            raise AssertionError("chunked signatures are not spoken here")
        with state.lock:
            state.requests += 1
            if state.refuse and state.spare:
                state.spare -= 1
            elif state.refuse:
                state.refuse -= 1
                self._answer(state.refusal, _error("SlowDown"))
                return False
        return True

    def _answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self._cuts(code) else body)

    def _cuts(self, code):
        state = self.server_state
        with state.lock:
            cuts = state.cut > 0 and self.command == "GET" and code < 300
            state.cut -= cuts
        self.close_connection |= cuts
        return cuts

    def _written(self, code=200, body=b"", **headers):
        with self.server_state.lock:
            lost = self.server_state.lose > 0
            self.server_state.lose -= lost
        self._answer(503 if lost else code, b"" if lost else body, **headers)

    def _arrives(self):
        """Wait while other pieces are on their way. Return whether the sender has waited, too."""
        state, look = self.server_state, select.poll()
        look.register(self.connection, select.POLLRDHUP)
        with state.lock:
            state.on_their_way += 1
        gone = bool(look.poll(50))  # ms, in which others come that were sent together with it
        while not gone and state.on_their_way > 1:
            gone = bool(look.poll(10))
        with state.lock:
            state.on_their_way -= 1
        return not gone

    def do_PUT(self):
        if not self._begin():
            return None
        state = self.server_state
        if state.narrow and "uploadId" in self.query and not self._arrives():
            self.close_connection = True
            return None
        with state.lock:
            if "uploadId" in self.query:
                parts = state.uploads[self.query["uploadId"]]
                parts[int(self.query["partNumber"])] = self.body
            elif self.headers.get("If-None-Match") == "*" and state.conflicts:
                state.conflicts -= 1
                return self._answer(409, _error("ConditionalRequestConflict"))
            elif self.headers.get("If-None-Match") == "*" and self.key in state.files:
                return self._answer(412, _error("PreconditionFailed"))
            else:
                state.files[self.key] = self.body
        return self._written(ETag=f'"{uuid.uuid4().hex}"')

    def do_POST(self):
        if not self._begin():
            return None
        state = self.server_state
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            state.uploads[upload] = {}
            return self._answer(200, _xml("InitiateMultipartUploadResult", UploadId=upload))
        if "uploadId" in self.query:
            parts = state.uploads.pop(self.query["uploadId"])
            with state.lock:
                state.files[self.key] = b"".join(parts[at] for at in sorted(parts))
            return self._written(body=_xml("CompleteMultipartUploadResult", ETag="x"))
        root = ElementTree.fromstring(self.body)
        keys = [item.text for item in root.iter() if item.tag.endswith("Key")]
        with state.lock:
            for key in keys:
                state.files.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_GET(self):
        if not self._begin():
            return None
        if not self.key:
            return self._list()
        data = self.server_state.files.get(self.key)
        if data is None:
            return self._answer(404, _error("NoSuchKey"))
        about = {"ETag": '"x"', "Last_Modified": "Sat, 21 Nov 2026 12:00:00 GMT"}
        wanted = self.headers.get("Range")
        if self.command == "HEAD" or wanted is None:
            return self._answer(200, data, Content_Length=len(data), **about)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            return self._answer(416, _error("InvalidRange"))
        piece = data[int(first) : int(last) + 1]
        with self.server_state.lock:
            self.server_state.bytes_out += len(piece)
        end = int(first) + len(piece) - 1
        return self._answer(206, piece, Content_Range=f"bytes {first}-{end}/{len(data)}", **about)

    do_HEAD = do_GET  # noqa: N815 - the base class finds it by this name

    def do_DELETE(self):
        if self._begin():
            with self.server_state.lock:
                self.server_state.files.pop(self.key, None)
            self._answer(204)

    def _list(self):
        prefix = self.query.get("prefix", "")
        with self.server_state.lock:
            found = {k: len(v) for k, v in self.server_state.files.items() if k.startswith(prefix)}
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>x</ETag>"
            "<LastModified>2026-11-21T12:00:00.000Z</LastModified></Contents>"
            for key, size in sorted(found.items())
        )
        text = (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}"
            f"<KeyCount>{len(found)}</KeyCount></ListBucketResult>"
        )
        self._answer(200, text.encode())


def _error(code):
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'  # in a line of its own, as S3 writes it
    return f"{head}<Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()


def _xml(tag, **fields):
    inner = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in fields.items())
    return f"<{tag}><Bucket>b</Bucket><Key>k</Key>{inner}</{tag}>".encode()
