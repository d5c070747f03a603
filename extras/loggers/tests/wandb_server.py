"""As much of a wandb server as a run needs that is recorded online: one run, whose history it keeps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

OWNER = {"id": "owner", "name": "someone"}


class WandbServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.ids: list[str] = []  # of the wandb run, at each start
        self.history: dict[int, dict[str, Any]] = {}  # by line, as the client numbers them
        self.is_silent_after_start = False  # then it accepts, and never answers any more
        self.closing = Event()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in sorted(self.history.items())]

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            return self._take(request)
        query = request.get("query", "")
        if "query RunResumeStatus" in query:
            return {"data": {"model": {"id": "project", "name": "steadfast", "entity": OWNER, "bucket": self._bucket()}}}
        if "mutation UpsertBucket" in query:
            self.ids.append(request["variables"]["name"])
            return {
                "data": {"upsertBucket": {"bucket": self._bucket(request["variables"]["name"]), "inserted": not self.history}}
            }
        if "mutation CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/uploaded"} for name in request["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "bucket", "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _take(self, request: dict[str, Any]) -> dict[str, Any]:
        part = request.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(part["content"], start=part["offset"]):
            self.history[number] = json.loads(line)
        return {}

    def _bucket(self, name: str | None = None) -> dict[str, Any] | None:
        if name is None and not self.ids:
            return None
        tail = [json.dumps(row) for row in self.rows[-1:]]
        return {
            "id": "bucket", "name": name or self.ids[-1], "displayName": "run", "summaryMetrics": "{}", "config": "{}",
            "logLineCount": 0, "historyLineCount": len(self.history), "eventsLineCount": 0, "tags": [],
            "historyTail": json.dumps(tail), "eventsTail": "[]", "wandbConfig": '{"t": 1}', "sweepName": None,
            "project": {"id": "project", "name": "steadfast", "entity": OWNER}, "historyLastStep": len(self.history),
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.is_silent_after_start and self.server.ids:
            self.server.closing.wait()
            return
        is_known = self.path == "/graphql" or self.path.endswith("/file_stream")
        self._reply(self.server.answer(self.path, json.loads(content)) if is_known else {})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply({})

    def _reply(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client need not be polite
            super().handle()

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
