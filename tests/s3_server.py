"""A real S3 server, moto's, in a process of its own: it honours If-None-Match, and can refuse every request for a time."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
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
    line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
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
