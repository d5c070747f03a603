"""A real S3 server, moto's, in a process of its own: it honours If-None-Match, and can refuse every request for a time."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any
from urllib.request import Request, urlopen

from fsspec import get_filesystem_class

BUCKET = "bucket"


@dataclass(frozen=True)
class S3Server:
    url: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which a command finds the server."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip

    def url_of(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def refuse(self) -> None:
        """Refuse all requests from now on: nobody has a key that the server knows."""
        self._let_in(0)

    def accept(self) -> None:
        self._let_in(10**9)

    def _let_in(self, count: int) -> None:
        how = {"Content-Type": "text/plain"}
        urlopen(Request(f"{self.url}/moto-api/reset-auth", data=str(count).encode(), headers=how, method="POST")).close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    line = [sys.executable, __file__]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
            server = S3Server(next(match[0] for match in found if match))
            Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            urlopen(Request(f"{server.url}/{BUCKET}", method="PUT")).close()
            get_filesystem_class("s3").clear_instance_cache()  # which knows the server of another module
            yield server
        finally:
            process.kill()


def serve() -> None:
    """Serve until killed, one request at a time: moto compares and puts in two steps, where S3 has one."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application, lock = DomainDispatcherApplication(create_backend_app), Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Any:
        with lock:
            return application(environ, start_response)

    run_simple("127.0.0.1", 0, one_at_a_time, threaded=True)


if __name__ == "__main__":
    serve()
