"""
A server of container logs for the benchmarks: as fast as a socket takes them, in a process of its own.

`python bench/log_server.py` prints its port. A pod's name says what it prints: `lines-500000-4096` prints 500,000
lines in pieces of about 4096 bytes (0: each line by itself), then ends. Until then it is running, afterwards it is not.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STREAM = "20260101T000000-00000-aaaaaaaa"
STAMP = b"2026-01-01T00:00:00.%09dZ "
HEADER = b"gpu-burst: output %s rank 0 of 1\n" % STREAM.encode()
LINE = b"step %07d loss 0.12345 throughput 1234.5 samples/s gpu 98%% mem 71.2 GiB\n"
BLOCK_LINES = 10_000


def block(size: int) -> bytes:
    """BLOCK_LINES lines with their stamps, in chunks of HTTP/1.1 of about `size` bytes."""
    chunks: list[bytes] = []
    piece = b""
    for number in range(BLOCK_LINES):
        piece += STAMP % number + LINE % number
        if len(piece) >= size or number == BLOCK_LINES - 1:
            chunks.append(chunk(piece))
            piece = b""
    return b"".join(chunks)


def chunk(data: bytes) -> bytes:
    """One chunk of an HTTP/1.1 body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server(ThreadingHTTPServer):
    """One thread for each connection."""

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that has gone is none."""


class Handler(BaseHTTPRequestHandler):
    """Answers for a pod and for its log; the log of a name is there once."""

    protocol_version = "HTTP/1.1"
    ended: set[str] = set()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.split("/")[6]
        if path.endswith("/log"):
            self._log(name)
        else:
            self._pod(name)

    def log_message(self, *_: object) -> None:
        pass

    def _log(self, name: str) -> None:
        _, lines, size = name.split("-")[:3]
        data = block(int(size))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.wfile.write(chunk(STAMP % 0 + HEADER))
            for _ in range(int(lines) // BLOCK_LINES):
                self.wfile.write(data)
            self.ended.add(name)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the reader has gone
            self.close_connection = True

    def _pod(self, name: str) -> None:
        running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        ended = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}}
        status = {"name": "trainer", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "train", "uid": name},
            "spec": {"containers": [{"name": "trainer"}]},
            "status": {
                "phase": "Running",
                "containerStatuses": [{**status, "state": ended if name in self.ended else running}],
            },
        }
        data = json.dumps(pod).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> int:
    """Serve until killed."""
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
