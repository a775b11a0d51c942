"""What Python adds to a token: CPU time of AsyncEngine, and of asgi under uvicorn, beside that of the engine alone.

    python python/bench/overhead.py MODEL.so [TEXTS [TOKENS]]

Each run writes the same texts; the times are CPU of the whole process per token, and the median of five runs. What is added is the difference to
the run in which nobody reads the texts until all are written.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time

import mlcc

RUNS = 5
PROMPT = [11, 12, 13, 14]


def options(tokens: int) -> dict[str, object]:
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def alone(path: str, texts: int, tokens: int) -> list[float]:
    found = []
    with mlcc.Model(path, threads=1, sequences=texts) as model:
        for _ in range(RUNS + 1):
            begin = time.process_time()
            streams = [model.generate([*PROMPT, n], **options(tokens)) for n in range(texts)]
            # Their events wait in memory: the last text's end is waited for without reading them.
            while model._core.running():
                time.sleep(0.01)
            found.append((time.process_time() - begin) / (texts * tokens))
            count = sum(len(piece.ids) for stream in streams for piece in stream)
            assert count == texts * tokens
    return found[1:]


def in_a_loop(path: str, texts: int, tokens: int) -> list[float]:
    async def main() -> list[float]:
        found = []
        async with mlcc.AsyncEngine(path, threads=1, sequences=texts) as engine:

            async def read(n: int) -> int:
                return sum([len(piece.ids) async for piece in engine.stream([*PROMPT, n], **options(tokens))])

            for _ in range(RUNS + 1):
                begin = time.process_time()
                counts = await asyncio.gather(*(read(n) for n in range(texts)))
                found.append((time.process_time() - begin) / (texts * tokens))
                assert sum(counts) == texts * tokens
        return found[1:]

    return asyncio.run(main())


SERVER = """
import sys, mlcc, uvicorn
app = mlcc.asgi(sys.argv[1], threads=1, sequences=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="error", access_log=False)
"""


def cpu_of(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(port: int, n: int, tokens: int) -> int:
    import json

    body = json.dumps({"prompt": [*PROMPT, n], "stream": True, **options(tokens)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    answer = await reader.read(-1)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer, answer[:300]
    return answer.count(b"data: {")


def under_uvicorn(path: str, texts: int, tokens: int) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", SERVER, path, str(texts), str(port)]) as server:
        try:
            for _ in range(600):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)

            async def once() -> None:
                await asyncio.gather(*(ask(port, n, tokens) for n in range(texts)))

            found = []
            for _ in range(RUNS + 1):
                begin = cpu_of(server.pid)
                asyncio.run(once())
                found.append((cpu_of(server.pid) - begin) / (texts * tokens))
            return found[1:]
        finally:
            server.terminate()


def main() -> None:
    path = sys.argv[1]
    texts = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    imports = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import mlcc"], check=True)
        with_it = time.perf_counter() - begin
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)
        imports.append(with_it - (time.perf_counter() - begin))
    print(f"import: {statistics.median(imports) * 1e3:.1f} ms")
    base = statistics.median(alone(path, texts, tokens))
    print(f"engine alone: {base * 1e6:.1f} us of CPU per token ({texts} texts of {tokens} tokens, 1 thread)")
    for name, run in (("AsyncEngine", in_a_loop), ("asgi under uvicorn", under_uvicorn)):
        found = statistics.median(run(path, texts, tokens))
        print(f"{name}: {found * 1e6:.1f} us, {(found - base) * 1e6:.1f} us added")


main()
