"""Many texts at once in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from . import _errors
from ._mlcc import Core, Exchange, Finished, Floats, Mailbox, Pending, Piece
from ._model import (
    CHAT,
    Adapter,
    Events,
    Json,
    Options,
    Path,
    chat_body,
    error_of,
    listed,
    load,
    name_of,
    prepared,
)

if TYPE_CHECKING:
    from types import TracebackType

# Prompts of more characters are tokenized beside the event loop.
_LONG = 4096
# Options whose grammars are compiled, which may take long.
_GRAMMARS = ("json_schema", "json_object", "regex", "choice", "grammar")


class Feed:
    """What a mailbox has for one text or request."""

    __slots__ = ("items", "_waiter")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self.items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until there is an item."""
        while not self.items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def get(self) -> Any:
        if not self.items:
            await self.wait()
        return self.items.popleft()


class Hub:
    """The mailbox of an event loop, and who waits for its items."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.mailbox = Mailbox()
        self._feeds: dict[int, Feed] = {}
        self._next = 0
        self._loop = loop
        loop.add_reader(self.mailbox.fileno(), self._ready)

    def _ready(self) -> None:
        for key, item in self.mailbox.drain():
            feed = self._feeds.get(key)
            if feed is not None:
                feed.put(item)

    def open(self) -> tuple[int, Feed]:
        self._next += 1
        feed = self._feeds[self._next] = Feed()
        return self._next, feed

    def forget(self, key: int) -> None:
        self._feeds.pop(key, None)

    def close(self) -> None:
        """Those who wait hear that there will be nothing more."""
        self._loop.remove_reader(self.mailbox.fileno())
        for feed in self._feeds.values():
            feed.put(_errors.Closed("the engine is closed"))
        self._feeds.clear()


class AsyncStream:
    """The pieces of a text. It ends when it is closed or dropped, and when the task that waits for it is cancelled."""

    def __init__(self, engine: AsyncEngine, prompt: str | Sequence[int], options: Json) -> None:
        self._engine = engine
        self._request: tuple[str | Sequence[int], Json] | None = (prompt, options)
        self._key = 0
        self._feed: Feed | None = None
        self._pending: Pending | None = None
        self._hub: Hub | None = None
        self.finished: Finished | None = None
        """What came out besides the text, once the text has ended by itself."""

    async def _start(self) -> None:
        if self._request is None:
            return
        (prompt, options), self._request = self._request, None
        core, hub = self._engine._running()
        self._hub = hub
        self._key, self._feed = hub.open()
        slow = isinstance(prompt, str) and len(prompt) > _LONG or any(options.get(name) for name in _GRAMMARS)
        try:
            if slow:
                post = asyncio.get_running_loop().run_in_executor(
                    None, core.post, hub.mailbox, self._key, prompt, options
                )
                try:
                    self._pending = await asyncio.shield(post)
                except asyncio.CancelledError:
                    post.add_done_callback(_cancel)
                    raise
            else:
                self._pending = core.post(hub.mailbox, self._key, prompt, options)
        except BaseException:
            self._end()
            raise

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        if self._request is not None:
            await self._start()
        while self._feed is not None:
            try:
                item = await self._feed.get()
            except asyncio.CancelledError:
                self._end()
                raise
            if type(item) is Piece:
                return item
            if type(item) is Finished:
                closed = item.reason == "cancelled" and self._pending is not None
                self.finished = item
                self._end()
                if closed:
                    raise _errors.Closed("the engine was closed while the text was written")
            elif isinstance(item, Exception):
                self._end()
                raise item
        raise StopAsyncIteration

    def _end(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._hub is not None:
            self._hub.forget(self._key)
            self._hub = None
        self._feed = self._request = None

    async def aclose(self) -> None:
        """Ends the text at the next step."""
        self._end()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()


def _cancel(post: asyncio.Future[Pending]) -> None:
    """Of a text that nobody waits for any more."""
    if not post.cancelled() and post.exception() is None:
        post.result().cancel()


async def _answer(hub: Hub, core: Core, body: bytes) -> AsyncIterator[Any]:
    """The status of an answer, then its bytes."""
    key, feed = hub.open()
    exchange: Exchange | None = None
    try:
        exchange = core.exchange(hub.mailbox, key, *CHAT, body)
        while (item := await feed.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, bytes):
                exchange.sent()
                yield item
            else:
                yield item[0]
    finally:
        hub.forget(key)
        if exchange is not None:
            exchange.cancel()


class AsyncEngine:
    """A compiled model in an event loop: many texts at once, without a thread for each.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncEngine("model.so") as engine:
    ...         async def text(prompt):
    ...             stream = engine.stream(prompt, max_tokens=4, temperature=0)
    ...             return "".join([piece.text async for piece in stream])
    ...         return await asyncio.gather(text("The sea"), text("A house"))
    >>> len(asyncio.run(main()))
    2

    The arguments are those of `Model`.
    """

    def __init__(
        self,
        path: Path,
        *,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        threads: int | None = None,
        cpu_level: str | None = None,
        template: str | None = None,
        sequences: int | None = None,
        max_queue: int = 64,
        memory: int | None = None,
    ) -> None:
        self._path = path
        self._settings: Json = {
            "adapters": listed(adapters),
            "threads": threads,
            "cpu_level": cpu_level,
            "template": template,
            "sequences": sequences,
            "max_queue": max_queue,
            "memory": memory,
        }
        self._core: Core | None = None
        self._hub: Hub | None = None

    def _running(self) -> tuple[Core, Hub]:
        if self._core is None or self._hub is None:
            raise _errors.Closed("the engine is not running: use `async with AsyncEngine(...) as engine`")
        if self._hub._loop is not asyncio.get_running_loop():
            raise _errors.Closed("the engine belongs to another event loop")
        return self._core, self._hub

    async def __aenter__(self) -> AsyncEngine:
        if self._core is not None:
            raise _errors.Error("the engine is running already")
        models = {name_of(self._path): self._path}
        self._core = await asyncio.to_thread(load, models, **self._settings)
        self._hub = Hub(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (core, self._core), (hub, self._hub) = (self._core, None), (self._hub, None)
        if hub is not None:
            hub.close()
        if core is not None:
            # A step may be under way.
            await asyncio.shield(asyncio.to_thread(core.close))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """A text, piece by piece. It is launched when its first piece is waited for."""
        self._running()
        return AsyncStream(self, prompt, prepared(options))

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> Json: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: Literal[True],
        **fields: Any,
    ) -> AsyncIterator[Json]: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Json | AsyncIterator[Json]:
        """An answer to messages, as `Model.chat` gives it."""
        core, hub = self._running()
        answer = _answer(hub, core, chat_body(messages, tools, response_format, adapter, stream, fields))
        status = await anext(answer)
        if stream and status < 400:
            return _events(answer)
        body = b"".join([data async for data in answer])
        if status >= 400:
            raise error_of(status, body)
        whole: Json = _loads(body)
        return whole

    async def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_text: str | None = None,
        dim: int | None = None,
    ) -> Floats:
        """A vector for each text, as `Model.embed` gives them."""
        core, _ = self._running()
        return await asyncio.to_thread(core.embed, list(texts), prompt, prompt_text, dim)

    async def load_adapter(self, name: str, path: Path, scale: float = 1.0) -> None:
        """Puts a LoRA adapter into a free slot, as `Model.load_adapter` does."""
        core, _ = self._running()
        await asyncio.to_thread(core.load_adapter, name, os.fspath(path), scale)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter, as `Model.unload_adapter` does."""
        core, _ = self._running()
        await asyncio.to_thread(core.unload_adapter, name)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with the tokens that a prompt begins with."""
        return self._running()[0].tokenize(text, special)

    def inspect(self) -> Json:
        """What is known of the model."""
        about: Json = _loads(self._running()[0].inspect())
        return about


def _loads(text: str | bytes) -> Any:
    import json

    return json.loads(text)


async def _events(answer: AsyncIterator[Any]) -> AsyncIterator[Json]:
    events = Events()
    async for data in answer:
        for piece in events.feed(data):
            yield piece
