"""The server of `mlcc serve` as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ._async import Hub
from ._mlcc import Core, Exchange
from ._model import Adapter, Json, Path, listed, load, name_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Seconds that a body may take to come.
_PATIENCE = 60.0
# What may stand in a path as it is.
_PLAIN = "/:@!$&'()*+,;=~-._"


class Application:
    """See `asgi`. It may be pickled as long as no event loop has run it; each process loads the models for itself."""

    def __init__(self, models: Mapping[str, Path], drain_timeout: float, settings: Json) -> None:
        self._models = dict(models)
        self._drain_timeout = drain_timeout
        self._settings = settings
        self._core: Core | None = None
        self._hub: Hub | None = None
        self._loading: asyncio.Task[Core] | None = None

    def __getstate__(self) -> tuple[dict[str, Path], float, Json]:
        return self._models, self._drain_timeout, self._settings

    def __setstate__(self, state: tuple[dict[str, Path], float, Json]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    async def startup(self) -> None:
        """Loads the models, unless they are loaded."""
        if self._core is not None:
            return
        if self._loading is None:
            work = asyncio.to_thread(load, self._models, **self._settings)
            self._loading = asyncio.ensure_future(work)
        try:
            # One request may go, the others want the models still.
            core = await asyncio.shield(self._loading)
        except Exception:
            self._loading = None
            raise
        if self._core is None:
            self._core, self._hub = core, Hub(asyncio.get_running_loop())

    async def shutdown(self) -> None:
        """Takes no more texts, waits for those that run as long as `drain_timeout` says, and gives the models back."""
        (core, self._core), (hub, self._hub) = (self._core, None), (self._hub, None)
        self._loading = None
        if core is not None:
            await asyncio.to_thread(core.drain, self._drain_timeout)
        if hub is not None:
            hub.close()
        if core is not None:
            await asyncio.to_thread(core.close)

    def check(self) -> None:
        """Raises `Closed` if the models were loaded and their engine has ended."""
        if self._core is not None:
            self._core.running()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._http(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise ValueError(f"mlcc answers http and lifespan, not {kind}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.startup()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.shutdown()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.startup()
        core, hub = self._core, self._hub
        if core is None or hub is None:
            return await _status(send, 503)
        limit: int = self._settings.get("body_limit", 8_000_000)
        try:
            body = await asyncio.wait_for(_body(receive, limit), _PATIENCE)
        except TimeoutError:
            return await _status(send, 408)
        if body is None:
            return
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        key, feed = hub.open()
        exchange: Exchange | None = None
        gone: asyncio.Task[None] | None = None
        try:
            exchange = core.exchange(hub.mailbox, key, scope["method"], _target(scope), headers, body)
            gone = asyncio.create_task(_wait_for_end(receive, exchange))
            head = await feed.get()
            if not isinstance(head, tuple):
                return
            status, headers = head
            await send({"type": "http.response.start", "status": status, "headers": headers})
            more = True
            while more:
                await feed.wait()
                pieces = []
                while feed.items and more:
                    item = feed.items.popleft()
                    if item is None:
                        more = False
                    elif isinstance(item, bytes):
                        pieces.append(item)
                        exchange.sent()
                    else:
                        # The client sees that the answer is not whole: it gets no end.
                        raise item
                data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            hub.forget(key)
            if exchange is not None:
                exchange.cancel()
            if gone is not None:
                gone.cancel()


async def _body(receive: Receive, limit: int) -> bytes | None:
    """The body of a request, cut behind the limit; none if the client has gone."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        # The server refuses what is longer than the limit; it need not see all of it.
        if piece and size <= limit:
            pieces.append(piece[: limit + 1 - size])
            size += len(pieces[-1])
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _wait_for_end(receive: Receive, exchange: Exchange) -> None:
    """Ends the texts of a client that has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.cancel()


async def _status(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def _target(scope: Scope) -> str:
    """Path and query, without the prefix under which the application is mounted."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    if root and path.startswith(root):
        path = path[len(root) :] or "/"
    query: bytes = scope.get("query_string", b"")
    return quote(path, safe=_PLAIN) + ("?" + query.decode("latin-1") if query else "")


def asgi(
    *paths: Path,
    alias: Sequence[str] = (),
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    threads: int | None = None,
    cpu_level: str | None = None,
    template: str | None = None,
    sequences: int | None = None,
    max_queue: int = 64,
    memory: int | None = None,
    api_keys: Sequence[str] = (),
    body_limit: int = 8_000_000,
    timeout: float | None = None,
    lora_dir: Path | None = None,
    drain_timeout: float = 30.0,
) -> Application:
    """The whole server of `mlcc serve`, its routes and its page, as an ASGI application for uvicorn, Ray Serve and others.

    >>> app = asgi("model.so", sequences=16)      # in serving.py: then `uvicorn serving:app`

    Models are loaded when the server starts (lifespan), or by the first request where there is no lifespan. `alias` are names for the models,
    one for each path (without: the file's name without .so), `adapters` LoRA adapters of the first model, each of which is a model of its own to
    clients; the other arguments are those of `mlcc serve`.
    """
    if not paths:
        raise TypeError("asgi needs the path of a compiled model")
    if len(alias) > len(paths):
        raise ValueError(f"{len(alias)} names in alias, but {len(paths)} models")
    names = [*alias, *(name_of(path) for path in paths[len(alias) :])]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have one name: give them names with alias (now {', '.join(names)})")
    settings: Json = {
        "adapters": listed(adapters),
        "threads": threads,
        "cpu_level": cpu_level,
        "template": template,
        "sequences": sequences,
        "max_queue": max_queue,
        "memory": memory,
        "api_keys": list(api_keys),
        "body_limit": body_limit,
        "timeout": timeout,
        "lora_dir": lora_dir,
    }
    return Application(dict(zip(names, paths, strict=True)), drain_timeout, settings)
