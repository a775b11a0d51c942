"""The server as an ASGI application: bare, and under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlcc
import pytest
import uvicorn


class Server:
    """uvicorn in a thread."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=10)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def url(self) -> str:
        return "http://127.0.0.1:{}".format(self.server.servers[0].sockets[0].getsockname()[1])

    def __enter__(self) -> Server:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def url(llama: Path) -> Iterator[str]:
    with Server(mlcc.asgi(llama, threads=1, template="chatml", sequences=2, max_queue=2)) as server:
        yield server.url


def lines(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


def test_routes_are_those_of_the_server(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "model"
        assert client.get("/v1/models/model").status_code == 200
        assert client.get("/").headers["content-type"].startswith("text/html")
        assert "mlcc" in client.get("/metrics").text
        assert client.get("/openapi.json").json()["openapi"]
        assert client.get("/props?model=model").status_code == 200
        assert client.get("/nothing").json()["error"]["code"] == "unknown_url"
        assert client.get("/v1/models/a%20b").status_code == 404
        assert client.delete("/health").status_code == 405
        assert client.get("/health", headers={"x-request-id": "own-1"}).headers["x-request-id"] == "own-1"


def test_answers_whole_and_streamed(url: str) -> None:
    body: dict[str, Any] = {"prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=30) as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            found = list(lines(response))
        assert found[-1] == "data: [DONE]"
        pieces = [json.loads(line[6:]) for line in found[:-1]]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 3


def test_wrong_requests(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.post("/v1/completions", content=b"x" * 9_000_000).status_code == 413
        assert client.post("/v1/completions", json={"prompt": "x", "temperature": -1}).status_code == 400


def test_a_client_that_goes_ends_its_text(url: str) -> None:
    body = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 500}
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(lines(response))
        for _ in range(300):
            if all(slot["is_processing"] is False for slot in client.get("/slots").json()):
                return
            time.sleep(0.01)
        pytest.fail("texts of clients that have gone still run")


def test_a_full_queue_says_when_to_come_again(url: str) -> None:
    body = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 500}
    with httpx.Client(base_url=url, timeout=30) as client, contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(8):
            response = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            statuses.append(response.status_code)
            if response.status_code == 429:
                assert response.headers["retry-after"]
                return
        pytest.fail(f"all were taken: {statuses}")


def test_keys(llama: Path) -> None:
    with Server(mlcc.asgi(llama, threads=1, api_keys=["secret"], alias=["tiny"])) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(server.url + "/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"


async def ask(app: Any, method: str, path: str, body: bytes = b"", root: str = "") -> tuple[int, bytes]:
    """A request without a server."""
    sent: list[Any] = []
    received = [{"type": "http.request", "body": body[i : i + 7], "more_body": True} for i in range(0, len(body), 7)]
    received.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        if received:
            return received.pop(0)
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": root + path,
        "root_path": root,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    assert sent[0]["type"] == "http.response.start" and sent[-1]["more_body"] is False
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


def test_without_lifespan_mounted_and_pickled(llama: Path, embedder: Path) -> None:
    app = pickle.loads(pickle.dumps(mlcc.asgi(llama, embedder, alias=["text"], threads=1, sequences=2)))

    async def main() -> None:
        found = await asyncio.gather(*(ask(app, "GET", "/v1/models") for _ in range(3)))
        for status, body in found:
            assert status == 200 and [one["id"] for one in json.loads(body)["data"]] == ["text", "model"]
        request = json.dumps({"prompt": "The", "max_tokens": 2, "ignore_eos": True}).encode()
        status, body = await ask(app, "POST", "/v1/completions", request, root="/prefix")
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2
        status, body = await ask(app, "POST", "/v1/embeddings", json.dumps({"input": ["the sea"]}).encode())
        assert status == 200 and len(json.loads(body)["data"]) == 1
        await app.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_lifespan_tells_what_is_wrong(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = mlcc.asgi(tmp_path / "missing.so")
    with pytest.raises(FileNotFoundError):
        asyncio.run(app({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == "lifespan.startup.failed" and "missing.so" in sent[0]["message"]


def test_shutdown_lets_texts_end(llama: Path) -> None:
    with Server(mlcc.asgi(llama, threads=1)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 400}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = lines(response)
            next(found)
            server.server.should_exit = True
            rest = list(found)
        assert rest[-1] == "data: [DONE]" and len(rest) > 300


def test_wrong_arguments(llama: Path) -> None:
    with pytest.raises(TypeError):
        mlcc.asgi()
    with pytest.raises(ValueError):
        mlcc.asgi(llama, llama)
    with pytest.raises(ValueError):
        mlcc.asgi(llama, alias=["a", "b"])
