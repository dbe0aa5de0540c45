"""Reads datasets from a server of one dataset, org/name, that replaces the Hub: `python
tests/support/hf_hub.py FOLDER NAME …`. Writes a line of JSON for each name, with its rows or its
error, and a last line with the paths that were requested. It runs in a separate process because the
Hub's address is read when its client is imported."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ROWS = [{"prompt": "ab", "answer": "AB"}, {"prompt": "cd", "answer": "CD"}]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMMIT, BLOB = "a" * 40, "b" * 40
FILE = {"type": "file", "path": "train.jsonl", "size": len(DATA), "oid": BLOB}
ABOUT = {
    "id": "org/name",
    "_id": "1",
    "sha": COMMIT,
    "private": False,
    "siblings": [{"rfilename": "train.jsonl"}],
}


class Hub(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        body, headers = None, {"X-Error-Code": "EntryNotFound"}
        if path.startswith("/api/datasets/org/name"):
            body, headers = (
                json.dumps([FILE] if "/tree/" in path else ABOUT).encode(),
                {"Content-Type": "application/json"},
            )
        elif path.startswith("/datasets/org/name/resolve/") and path.endswith("/train.jsonl"):
            body, headers = DATA, {"ETag": f'"{BLOB}"', "X-Repo-Commit": COMMIT}
        self.send_response(404 if body is None else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if has_body and body:
            self.wfile.write(body)


def main(folder: str, *names: str) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": folder,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    import rollmesh as rm
    from rollmesh.run.data import rows_of

    said: list[Any] = []
    for name in names:
        try:
            said.append(rows_of(name, Path("not/there"), None, "train"))
        except rm.ConfigError as error:
            said.append(str(error))
    server.shutdown()
    sys.stdout.writelines(json.dumps(item) + "\n" for item in (*said, Hub.asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
