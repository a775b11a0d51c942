"""Two replicas behind Ray's proxy: what clients see is what `mlcc serve` shows them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster import cluster, deploy

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/ray"


# Of the load under which a replica dies.
STREAMS = 16
TOKENS = 400


def completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def configuration() -> None:
    """Ray reads serve.yaml, and its application is the deployment of app.py."""
    import app

    read = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLE / "serve.yaml").read_text()))
    (one,) = read.applications
    (deployment,) = one.deployments
    assert (one.import_path, deployment.name) == ("app:app", app.Server.name)
    print("configuration: ok")


async def routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "model"
    assert (await client.get("/")).headers["content-type"].startswith("text/html")
    assert (await client.get("/nothing")).json()["error"]["code"] == "unknown_url"
    wrong = await client.post("/v1/completions", json=completion("x", 1, temperature=-1))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"


async def pieces(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


async def streams(client: httpx.AsyncClient) -> None:
    body = completion("The sea was", 20)
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    found = [piece async for piece in pieces(client, body)]
    assert found.pop() == "[DONE]"
    assert "".join(json.loads(piece)["choices"][0]["text"] for piece in found) == whole


# Conversations begin with different words: what several have in common is known to the second one already.
WORDS = "The A In It He She They We You I That This What When Where Some".split()
TURNS = 3


async def conversations(client: httpx.AsyncClient) -> None:
    """A prompt is known where the turn before was written: each conversation stays with its replica, and there are two of these."""
    finished = []
    for word in WORDS:
        headers = {"x-session-id": f"conversation {word}"}
        prompt = f"{word} old house and the garden by the sea"
        for turn in range(TURNS):
            answer = await client.post("/v1/completions", json=completion(prompt, 12), headers=headers)
            found = answer.json()
            known = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (known > 4) == (turn > 0), (word, turn, known)
            prompt += found["choices"][0]["text"]
    for word in WORDS:
        text = (await client.get("/metrics", headers={"x-session-id": f"conversation {word}"})).text
        number = re.search(r'^mlcc_texts_finished_total\{model="model"\} (\S+)$', text, re.MULTILINE)
        assert number
        finished.append(float(number[1]))
    assert max(finished) < TURNS * len(WORDS), f"all went to one replica: {finished}"


def replicas() -> list[int]:
    """Processes of replicas."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:mlcc:"):
                found.append(int(folder.name))
    return sorted(found)


async def a_replica_dies(client: httpx.AsyncClient) -> None:
    async def one(session: int) -> bool:
        headers = {"x-session-id": str(session)}
        body = {**completion("The", TOKENS), "stream": True}
        last = ""
        try:
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                started.release()
                async for line in response.aiter_lines():
                    last = line or last
        except httpx.HTTPError:
            return False
        return last == "data: [DONE]"

    started = asyncio.Semaphore(0)
    before = replicas()
    assert len(before) == 2, before
    tasks = [asyncio.create_task(one(session)) for session in range(STREAMS)]
    for _ in tasks:
        await started.acquire()
    os.kill(before[0], signal.SIGKILL)
    ended = await asyncio.gather(*tasks)
    # Those of the other replica come to their end.
    assert any(ended), "all streams broke"
    until = time.monotonic() + 60
    while len(replicas()) < 2 or (await client.get("/health")).status_code != 200:
        assert time.monotonic() < until, "the replica was not replaced"
        await asyncio.sleep(0.2)
    for session in range(STREAMS):
        answer = await client.post("/v1/completions", json=completion("The", 2), headers={"x-session-id": str(session)})
        assert answer.status_code == 200, answer.text
    print(f"a replica killed: {ended.count(False)} of {len(ended)} streams broke")


async def main(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for test in (routes, streams, conversations, a_replica_dies):
            await test(client)
            print(f"{test.__name__}: ok", flush=True)


if __name__ == "__main__":
    configuration()
    with cluster() as found:
        deploy(2)
        asyncio.run(main(found))
