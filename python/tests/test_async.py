"""Many texts in one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import mlcc
import pytest

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def text(engine: mlcc.AsyncEngine, prompt: str, **options: Any) -> str:
    return "".join([piece.text async for piece in engine.stream(prompt, **options)])


def test_texts_are_those_of_a_model(llama: Path) -> None:
    prompts = [f"Number {i} of many" for i in range(24)]
    options: mlcc.Options = {"temperature": 0, "max_tokens": 10}
    with mlcc.Model(llama, threads=1) as model:
        alone = ["".join(piece.text for piece in model.generate(prompt, **options)) for prompt in prompts]

    async def main() -> list[str]:
        async with mlcc.AsyncEngine(llama, threads=1, sequences=8) as engine:
            assert engine.inspect()["context"] == 512 and engine.tokenize("The sea")
            before = threading.active_count()
            texts = await asyncio.gather(*(text(engine, prompt, **options) for prompt in prompts))
            # There is no thread of Python for any of them.
            assert threading.active_count() == before
            return texts

    assert run(main()) == alone


def test_a_cancelled_task_ends_its_text(llama: Path) -> None:
    async def main() -> None:
        async with mlcc.AsyncEngine(llama, threads=1, sequences=1, max_queue=0) as engine:
            started = asyncio.Event()

            async def endless() -> None:
                while True:
                    async for _ in engine.stream("The", ignore_eos=True):
                        started.set()

            task = asyncio.create_task(endless())
            await started.wait()
            with pytest.raises(mlcc.QueueFull):
                await text(engine, "The", max_tokens=1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await place(engine)
            # One whose task is cancelled before its first piece.
            early = asyncio.create_task(text(engine, "word " * 300, max_tokens=200, ignore_eos=True))
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            await place(engine)
            # One that is left, one that is closed, one that is dropped.
            async for _ in engine.stream("The", ignore_eos=True):
                break
            await place(engine)
            async with engine.stream("The", ignore_eos=True) as stream:
                await anext(stream)
            assert [piece async for piece in stream] == []
            await place(engine)

    async def place(engine: mlcc.AsyncEngine) -> None:
        for _ in range(200):
            try:
                await text(engine, "The", max_tokens=1, ignore_eos=True)
                return
            except mlcc.QueueFull:
                await asyncio.sleep(0.01)
        pytest.fail("the place was not given back")

    run(main())


def test_finished_and_errors(llama: Path) -> None:
    async def main() -> None:
        engine = mlcc.AsyncEngine(llama, threads=1)
        with pytest.raises(mlcc.Closed, match="async with"):
            engine.stream("The")
        async with engine:
            stream = engine.stream("The", max_tokens=3, ignore_eos=True, logprobs=0)
            pieces = [piece async for piece in stream]
            assert sum(len(piece.ids) for piece in pieces) == 3 and pieces[0].logprobs is not None
            assert stream.finished is not None and stream.finished.reason == "length"
            with pytest.raises(mlcc.InvalidRequest):
                await text(engine, "The", temperature=-1)
            with pytest.raises(mlcc.ContextFull):
                await text(engine, "word " * 2000)
            with pytest.raises(mlcc.GrammarError):
                await text(engine, "The", regex="(")
            assert (await text(engine, "The", choice=["yes", "no"])) in ("yes", "no")
            with pytest.raises(mlcc.Error):
                await engine.__aenter__()
            running = engine.stream("The", ignore_eos=True)
            await anext(running)
            task = asyncio.create_task(text(engine, "The", ignore_eos=True))
            await asyncio.sleep(0.01)
        for left in (running.__anext__(), task):
            with pytest.raises(mlcc.Closed):
                while True:
                    await left
                    left = running.__anext__()
        with pytest.raises(mlcc.Closed):
            engine.stream("The")
        # It may be started again.
        async with engine:
            assert await text(engine, "The", max_tokens=2)

    run(main())


def test_chat(llama: Path) -> None:
    async def main() -> None:
        async with mlcc.AsyncEngine(llama, threads=1, template="chatml") as engine:
            messages = [{"role": "user", "content": "The sea?"}]
            options: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
            answer = await engine.chat(messages, **options)
            pieces = [piece async for piece in await engine.chat(messages, stream=True, **options)]
            parts = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces]
            assert "".join(parts) == answer["choices"][0]["message"]["content"]
            with pytest.raises(mlcc.InvalidRequest):
                await engine.chat(messages, temperature=-1)

    run(main())


def test_vectors(embedder: Path) -> None:
    async def main() -> None:
        async with mlcc.AsyncEngine(embedder, threads=1) as engine:
            assert (await engine.embed(["the sea", "a house"])).shape[0] == 2
            with pytest.raises(mlcc.InvalidRequest):
                await text(engine, "The")

    run(main())
