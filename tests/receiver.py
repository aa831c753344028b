"""A real server on loopback that takes what is posted to it."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """It answers with `statuses` first, and then with 200 and `says`; what it has taken it keeps."""

    def __init__(self) -> None:
        self.statuses, self.says, self.tries = list[int](), b"{}", 0
        self.taken: list[tuple[str, dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.tries += 1
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                if status == 200:
                    receiver.taken.append((self.path, dict(self.headers), body))
                self.send_response(status)
                self.send_header("Content-Length", str(len(receiver.says)))
                self.end_headers()
                self.wfile.write(receiver.says)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
