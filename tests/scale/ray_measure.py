"""One replica of one thread against two, and the time to the first token beside that of `mlcc serve`. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time

import httpx

from cluster import cluster, deploy, free_port

# As many as two replicas compute together; the half of them waits for one.
STREAMS = 32
TOKENS = 400
ROUNDS = 3


async def rate(client: httpx.AsyncClient, seconds: float) -> float:
    """Tokens per second of texts that come as a whole, so that what is measured is replicas and not a proxy's work for each token."""
    until = time.perf_counter() + seconds

    async def one(number: int) -> int:
        tokens = 0
        while time.perf_counter() < until:
            body = {"prompt": f"Number {number} was", "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
            # A new conversation each time: they spread over the replicas.
            headers = {"x-session-id": f"{number} {time.perf_counter()}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            tokens += answer.json()["usage"]["completion_tokens"]
        return tokens

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(number) for number in range(STREAMS))))
    return tokens / (time.perf_counter() - start)


async def first_token(client: httpx.AsyncClient) -> float:
    """Milliseconds until an idle server's first piece of a stream, the median of 30."""
    found = []
    for number in range(33):
        body = {"prompt": f"It was number {number}", "max_tokens": 2, "ignore_eos": True, "stream": True}
        start = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    found.append(1000 * (time.perf_counter() - start))
                    break
    return statistics.median(found[3:])


def with_client(url: str, measure, *arguments: float) -> float:
    async def run() -> float:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            return await measure(client, *arguments)

    return asyncio.run(run())


def serve() -> tuple[subprocess.Popen, str]:
    """`mlcc serve` with as many threads as a replica has."""
    port = free_port()
    command = [os.environ["MLCC"], "serve", os.environ["MLCC_MODEL"], "-t", "1", "--port", str(port), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout and server.stdout.readline()
    return server, f"http://127.0.0.1:{port}"


def main() -> None:
    alone, two = [], []
    server, direct = serve()
    first = {"mlcc serve": with_client(direct, first_token)}
    server.terminate()
    server.wait()
    with cluster() as url:
        deploy(1)
        first["ray"] = with_client(url, first_token)
        for _ in range(ROUNDS):
            deploy(1)
            alone.append(with_client(url, rate, 8.0))
            deploy(2)
            two.append(with_client(url, rate, 8.0))
    ratio = statistics.median(two) / statistics.median(alone)
    print(json.dumps({"tokens_per_s": {"one": alone, "two": two}, "ratio": ratio, "first_token_ms": first}, indent=1))


if __name__ == "__main__":
    main()
