"""`examples/ray/llm.py`, with stand-ins for the types that Ray Serve LLM takes from vLLM or SGLang, and for the application that answers: what it
does between the two. That the application is right is tested in `test_asgi.py`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

WORKSPACE = Path(__file__).resolve().parents[2]
API = "ray.llm._internal.serve.core.configs.openai_api_models"


class Object:
    """A model of pydantic, as far as it is used."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, *, mode: str, exclude_unset: bool) -> dict[str, Any]:
        assert mode == "json" and exclude_unset
        return self.fields

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]


class Application:
    """What `mlcc.asgi` gives, as far as it is used: words of the prompt, in the form of a completion."""

    def __init__(self, path: str, **settings: Any) -> None:
        self.path, self.settings, self.started, self.cancelled = path, settings, False, False

    async def startup(self) -> None:
        self.started = True

    def check(self) -> None:
        assert self.started

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert (scope["type"], scope["method"]) == ("http", "POST")
        body = json.loads((await receive())["body"])
        wrong = body["model"] not in self.settings["alias"]
        if wrong or scope["path"] == "/v1/embeddings":
            error = {"error": {"message": "no such model", "type": "invalid_request_error"}}
            await self._send(send, 404 if wrong else 400, json.dumps(error).encode())
            return
        assert scope["path"] in ("/v1/completions", "/v1/chat/completions") and "n" not in body
        if not body.get("stream"):
            await self._send(send, 200, json.dumps({"choices": [{"text": body.get("prompt", "chat")}]}).encode())
            return
        words = [{"choices": [{"text": word}]} for word in ["The s\u00e9a", " was"]] * body["max_tokens"]
        events = b"".join(b"data: " + json.dumps(word, ensure_ascii=False).encode() + b"\n\n" for word in words)
        events += b"data: [DONE]\n\n"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            # In pieces that know nothing of events, nor of characters.
            for at in range(0, len(events), 7):
                await send({"type": "http.response.body", "body": events[at : at + 7], "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def _send(self, send: Any, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    parts = API.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    for name in ("ChatCompletionResponse", "CompletionResponse", "EmbeddingResponse", "ErrorResponse", "ErrorInfo"):
        setattr(sys.modules[API], name, type(name, (Object,), {}))
    for end in range(2, len(parts) + 1):
        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[".".join(parts[:end])])
    mlcc = ModuleType("mlcc")
    mlcc.asgi = Application  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlcc", mlcc)
    spec = importlib.util.spec_from_file_location("ray_llm_example", WORKSPACE / "examples/ray/llm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def config(path: str = "/models/model.so", **more: Any) -> SimpleNamespace:
    loading = SimpleNamespace(model_id="model", model_source=path)
    engine = {"threads": 1, "sequences": 2, "template": "plain"}
    fields: dict[str, Any] = {"deployment_config": {}, "runtime_env": None, **more}
    return SimpleNamespace(model_loading_config=loading, engine_kwargs=engine, **fields)


def test_options_are_those_of_the_deployment(llm: Any) -> None:
    asked = {"autoscaling_config": {"max_replicas": 3}}
    options = llm.Server.get_deployment_options(config(deployment_config=asked, runtime_env={"env_vars": {"A": "b"}}))
    assert options["ray_actor_options"] == {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "b"}}}
    assert options["autoscaling_config"] == {"max_replicas": 3} and "ray_actor_options" not in asked


def test_a_replica_answers(llm: Any) -> None:
    asyncio.run(_answers(llm))


async def _answers(llm: Any) -> None:
    server = llm.Server(config())
    app = await server.__serve_build_asgi_app__()
    assert (app.path, app.settings["alias"], app.settings["threads"]) == ("/models/model.so", ["model"], 1)
    await server.start()
    await server.check_health()
    asked = {"model": "model", "prompt": "The sea", "max_tokens": 2}
    [whole] = [piece async for piece in server.completions(Object(**asked, n=None))]
    assert type(whole).__name__ == "CompletionResponse" and whole.choices[0]["text"] == "The sea"
    messages = [{"role": "user", "content": "The sea"}]
    [answer] = [piece async for piece in server.chat(Object(model="model", messages=messages))]
    assert type(answer).__name__ == "ChatCompletionResponse"

    pieces = [piece async for piece in server.completions(Object(**asked, stream=True))]
    assert all(piece.startswith("data: ") and piece.endswith("\n\n") for piece in pieces)
    assert pieces.pop() == "data: [DONE]\n\n"
    texts = [json.loads(piece.removeprefix("data: "))["choices"][0]["text"] for piece in pieces]
    assert texts == ["The s\u00e9a", " was"] * 2

    for stream in (False, True):
        wrong = Object(**{**asked, "model": "other"}, stream=stream)
        [error] = [piece async for piece in server.completions(wrong)]
        assert type(error).__name__ == "ErrorResponse" and error.error.code == 404 and error.error.message
    [error] = [piece async for piece in server.embeddings(Object(model="model", input="The sea"))]
    assert type(error).__name__ == "ErrorResponse" and error.error.code == 400

    # Who goes away early ends the text.
    begun = server.completions(Object(**{**asked, "max_tokens": 1000}, stream=True))
    await anext(begun)
    await begun.aclose()
    await asyncio.sleep(0)
    assert app.cancelled
