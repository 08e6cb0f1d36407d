"""A client of the protocol, on http.client and msgpack alone."""

import contextlib
import http.client
import json
from urllib.parse import urlsplit

import msgpack

JSON, MSGPACK = "application/json", "application/msgpack"


class Client:
    """One connection that is kept."""

    def __init__(self, url, kind=JSON):
        self.http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.kind = kind

    def __call__(self, path, fields=None, method="POST", body=None, **headers):
        """The status and the answer."""
        if body is None:
            body = b"" if fields is None else msgpack.packb(fields) if self.kind == MSGPACK else json.dumps(fields)
        self.http.request(method, path, body, {"Content-Type": self.kind, **headers})
        answer = self.http.getresponse()
        data = answer.read()
        if answer.headers.get_content_type() == MSGPACK:
            return answer.status, msgpack.unpackb(data)
        is_json = answer.headers.get_content_type() == JSON
        return answer.status, json.loads(data) if is_json else data.decode()

    def act(self, obs, **fields):
        status, answer = self("/act", {"obs": obs, **fields})
        assert status == 200, answer
        return answer["action"]

    def open(self, **fields):
        status, answer = self("/sessions", fields)
        assert status == 200, answer
        return answer["session"]

    def metric(self, name):
        """The sum of a metric over its labels."""
        lines = self("/metrics", method="GET")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].split()[0] == name)


@contextlib.contextmanager
def connected(url, kind=JSON):
    client = Client(url, kind)
    try:
        yield client
    finally:
        client.http.close()
