"""mlcc under Ray Serve LLM: Ray's own ingress in the form of the OpenAI API, and its routers, before replicas of mlcc.

    from llm import Server                                  # this file
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "model", "model_source": "/models/model.so"},
        server_cls=Server,
        engine_kwargs={"threads": 2, "sequences": 16},      # as those of mlcc.asgi
        deployment_config={"ray_actor_options": {"num_cpus": 2}},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))

Ray's ingress takes the types of its requests from vLLM or SGLang, so one of these has to be installed beside ray[llm]; mlcc uses neither. A replica
answers with what the routes of `mlcc serve` answer.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import mlcc
from ray.llm._internal.serve.core.configs import openai_api_models as api


class Server:
    """A replica: what `LLMConfig(server_cls=...)` takes."""

    def __init__(self, llm_config: Any) -> None:
        self._config = llm_config
        loading = llm_config.model_loading_config
        settings = {"alias": [loading.model_id], **llm_config.engine_kwargs}
        self._app = mlcc.asgi(loading.model_source or loading.model_id, **settings)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Those that were asked for, with as many CPUs as there are worker threads."""
        options = copy.deepcopy(llm_config.deployment_config)
        actor = options.setdefault("ray_actor_options", {})
        actor.setdefault("num_cpus", llm_config.engine_kwargs.get("threads", 1))
        if llm_config.runtime_env:
            actor.setdefault("runtime_env", {}).update(llm_config.runtime_env)
        return options

    async def start(self) -> None:
        """Loads the model."""
        await self._app.startup()

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises: its engine has died."""
        self._app.check()

    async def llm_config(self) -> Any:
        return self._config

    async def __serve_build_asgi_app__(self) -> Any:
        """For Ray's direct streaming: all routes of `mlcc serve`."""
        return self._app

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(self._post("chat/completions", request, api.ChatCompletionResponse)) as pieces:
            async for piece in pieces:
                yield piece

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(self._post("completions", request, api.CompletionResponse)) as pieces:
            async for piece in pieces:
                yield piece

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(self._post("embeddings", request, api.EmbeddingResponse)) as pieces:
            async for piece in pieces:
                yield piece

    async def _post(self, route: str, request: Any, answer: Any) -> AsyncGenerator[Any, None]:
        """The pieces of a stream as text, or one object. What the client did not write is the server's to choose."""
        wanted = {name: value for name, value in request.model_dump(mode="json", exclude_unset=True).items() if value is not None}
        body = json.dumps(wanted).encode()
        given: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                # The client stays until it is cancelled.
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/v1/{route}",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }

        async def work() -> None:
            try:
                await self._app(scope, receive, given.put)
            finally:
                await given.put({"type": "end"})

        task = asyncio.create_task(work())
        try:
            async with aclosing(_pieces(given, bool(wanted.get("stream")), answer)) as pieces:
                async for piece in pieces:
                    yield piece
            await task
        finally:
            task.cancel()


async def _pieces(given: asyncio.Queue[dict[str, Any]], stream: bool, answer: Any) -> AsyncGenerator[Any, None]:
    status, rest = 500, b""
    while (message := await given.get())["type"] != "end":
        if message["type"] == "http.response.start":
            status = message["status"]
            continue
        rest += message.get("body", b"")
        if stream and status == 200:
            # Whole events: bytes of one character may come apart.
            *events, rest = rest.split(b"\n\n")
            for event in events:
                yield event.decode() + "\n\n"
    if status != 200:
        yield _error(status, rest)
    elif not stream:
        yield answer(**json.loads(rest))


def _error(status: int, body: bytes) -> Any:
    try:
        error = json.loads(body)["error"]
        message, kind = str(error["message"]), str(error["type"])
    except (ValueError, KeyError, TypeError):
        message, kind = body.decode(errors="replace") or "the server gave no answer", "internal_error"
    return api.ErrorResponse(error=api.ErrorInfo(message=message, type=kind, code=status))
