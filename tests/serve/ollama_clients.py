"""ollama and langchain-ollama against a server over the toy model: `tests/serve/run`."""

import asyncio
import json
import subprocess
import sys
from importlib.metadata import version

import ollama
from langchain_ollama import ChatOllama, OllamaLLM

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Jena"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
OPTIONS = {"num_predict": 9, "temperature": 0, "num_ctx": 512, "num_gpu": 0}
HEADERS = {"Authorization": "Bearer key"}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


def refused(status, body):
    try:
        body()
    except ollama.ResponseError as error:
        assert error.status_code == status and isinstance(error.error, str), error
        return error.error
    raise AssertionError("no error")


def with_ollama(url):
    client = ollama.Client(url, headers=HEADERS)
    assert client.list().models[0].model == "toy:latest"
    assert client.ps().models[0].context_length == 4000
    shown = client.show("toy")
    assert shown.capabilities == ["completion", "tools"] and shown.template and shown.modelinfo
    whole = client.chat("toy", messages=MESSAGES, options=OPTIONS)
    assert whole.done_reason == "length" and whole.eval_count == 9 and whole.eval_duration > 0
    pieces = list(client.chat("toy:latest", messages=MESSAGES, options=OPTIONS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content and pieces[-1].done
    assert client.generate("toy", "Hi", options=OPTIONS).response == whole.message.content
    pieces = client.generate("toy", "Hi", raw=True, options=OPTIONS, stream=True, logprobs=True, top_logprobs=2)
    assert sum(len(piece.logprobs or []) for piece in pieces) == 9
    held = client.chat("toy", messages=MESSAGES, format=SCHEMA, options={"num_predict": 200})
    assert json.loads(held.message.content)["city"] in ("Ulm", "Jena")
    client.chat("toy", messages=MESSAGES, tools=[weather], options=OPTIONS)
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]}
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    client.chat("toy", messages=[*MESSAGES, called, result], tools=[weather], options=OPTIONS)
    assert "other" in refused(404, lambda: client.chat("other", messages=MESSAGES))
    assert "mlcc build" in refused(400, lambda: client.pull("llama3"))
    assert "suffix" in refused(400, lambda: client.generate("toy", "a", suffix="b"))
    assert "images" in refused(400, lambda: client.generate("toy", "a", images=[b"abc"]))
    assert "embedding model" in refused(400, lambda: client.embed("toy", "a"))
    refused(401, ollama.Client(url).list)

    async def count():
        parts = await ollama.AsyncClient(url, headers=HEADERS).chat("toy", messages=MESSAGES, options=OPTIONS, stream=True)
        return len([part async for part in parts])

    assert asyncio.run(count()) == 10


def with_langchain(url):
    base = {"model": "toy", "base_url": url, "temperature": 0, "client_kwargs": {"headers": HEADERS}}
    model = ChatOllama(num_predict=9, num_ctx=512, validate_model_on_init=True, **base)
    whole = model.invoke("Hi")
    assert whole.usage_metadata["output_tokens"] == 9
    assert "".join(piece.content for piece in model.stream("Hi")) == whole.content
    held = ChatOllama(num_predict=200, **base).with_structured_output({"title": "place", **SCHEMA}, method="json_schema")
    assert held.invoke("Hi")["city"] in ("Ulm", "Jena")
    model.bind_tools([weather]).invoke("Hi")
    assert OllamaLLM(num_predict=9, **base).invoke("Hi")


def main():
    with subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()
        with_ollama(url)
        with_langchain(url)
        server.stdin.close()
        assert server.wait(timeout=60) == 0
    print(", ".join(f"{name} {version(name)}" for name in ["ollama", "langchain-ollama"]))


main()
