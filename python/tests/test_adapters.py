"""LoRA adapters that sessions and texts choose."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import mlcc
import numpy
import pytest
from conftest import Adapted
from mlcc._model import Adapter
from test_asgi import ask

GREEDY: mlcc.Options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPT = "The sea was"


def text(model: mlcc.Model, **options: Any) -> str:
    return "".join(piece.text for piece in model.generate(PROMPT, **{**GREEDY, **options}))


def test_a_session_goes_through_an_adapter(adapted: Adapted, llama: Path) -> None:
    adapters: dict[str, Adapter] = {"style": adapted.style, "task": (adapted.task, 0.5)}
    with mlcc.Model(adapted.model, threads=1, adapters=adapters) as model:
        assert model.adapters == ["style", "task"]
        tokens = model.tokenize(PROMPT)
        with mlcc.Model(adapted.merged, threads=1) as merged, mlcc.Model(llama, threads=1) as plain:
            expected = numpy.asarray(merged.session().prefill(tokens))
            base = numpy.asarray(plain.session().prefill(tokens))
        session = model.session(adapter="style")
        found = numpy.asarray(session.prefill(tokens))
        assert numpy.abs(found - expected).max() < 1e-4 * numpy.abs(expected).max()
        assert numpy.abs(found - base).max() > 1e-2 * numpy.abs(expected).max()
        # Without one it is the model to the bit.
        assert (numpy.asarray(model.session().prefill(tokens)) == base).all()
        assert session.adapter == "style" and session.fork().adapter == "style"
        assert model.session().adapter is None
        session.reset()
        assert (numpy.asarray(session.prefill(tokens)) == found).all()


def test_a_scale_multiplies(adapted: Adapted, tmp_path: Path) -> None:
    config = json.loads((adapted.style / "adapter_config.json").read_text())
    half = tmp_path / "half"
    half.mkdir()
    (half / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    (half / "adapter_model.safetensors").write_bytes((adapted.style / "adapter_model.safetensors").read_bytes())
    adapters: dict[str, Any] = {"scaled": (adapted.style, 0.5), "half": half}
    with mlcc.Model(adapted.model, threads=1, adapters=adapters) as model:
        scaled, halved = (model.session(adapter=name).prefill([5, 6, 7]).tolist() for name in adapters)
        assert scaled == halved != model.session().prefill([5, 6, 7]).tolist()


def test_texts_choose_an_adapter(adapted: Adapted) -> None:
    adapters = {"style": adapted.style, "task": adapted.task}
    with mlcc.Model(adapted.model, threads=1, adapters=adapters, template="plain") as model:
        texts = [text(model), text(model, adapter="style"), text(model, adapter="task"), text(model, adapter=None)]
        assert len(set(texts)) == 3 and texts[0] == texts[3]
        with mlcc.Model(adapted.merged, threads=1) as merged:
            assert texts[1] == text(merged)
        message = [{"role": "user", "content": PROMPT}]
        answers = [
            model.chat(message, adapter=name, max_tokens=8, temperature=0, ignore_eos=True) for name in (None, "style")
        ]
        contents = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert answers[1]["model"] == "style" and contents[0] != contents[1]

    async def main() -> list[str]:
        async with mlcc.AsyncEngine(adapted.model, threads=1, sequences=4, adapters=adapters) as engine:
            async def write(name: str | None) -> str:
                options: mlcc.Options = {**GREEDY, "adapter": name}
                return "".join([piece.text async for piece in engine.stream(PROMPT, **options)])

            return list(await asyncio.gather(*(write(name) for name in (None, "style", "task"))))

    assert asyncio.run(asyncio.wait_for(main(), 60)) == texts[:3]


def test_an_application_has_adapters_as_models(adapted: Adapted, llama: Path) -> None:
    app = mlcc.asgi(adapted.model, llama, alias=["base", "other"], threads=1, adapters={"style": (adapted.style, 1)})
    app = pickle.loads(pickle.dumps(app))

    async def main() -> None:
        _, body = await ask(app, "GET", "/v1/models")
        found = [(one["id"], one.get("parent")) for one in json.loads(body)["data"]]
        assert found == [("base", None), ("style", "base"), ("other", None)]
        texts = []
        for name in ("base", "style", "other"):
            request = {"model": name, "prompt": PROMPT, **GREEDY}
            status, body = await ask(app, "POST", "/v1/completions", json.dumps(request).encode())
            answer = json.loads(body)
            assert (status, answer["model"]) == (200, name)
            texts.append(answer["choices"][0]["text"])
        assert texts[0] == texts[2] != texts[1]
        await app.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_adapters_that_cannot_be_taken(adapted: Adapted, llama: Path, tmp_path: Path) -> None:
    def refused(path: Path, adapters: dict[str, Any], *parts: str) -> None:
        with pytest.raises(mlcc.AdapterError) as error:
            mlcc.Model(path, threads=1, adapters=adapters)
        assert all(part in str(error.value) for part in parts), str(error.value)

    refused(llama, {"style": adapted.style}, "--lora-slots")
    refused(adapted.model, {name: adapted.style for name in "abc"}, "all 2 slots")
    refused(adapted.model, {"model": adapted.style}, "two models are called model")
    refused(adapted.model, {"a/b": adapted.style}, "a/b")
    refused(adapted.model, {"": adapted.style}, "not an adapter name")
    refused(adapted.model, {"style": (adapted.style, float("nan"))}, "finite")
    refused(adapted.model, {"style": tmp_path}, "adapter_config.json")
    for file in adapted.style.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    refused(adapted.model, {"style": tmp_path}, "IA3")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mlcc.Model(adapted.model, adapters={"style": tmp_path / "nowhere"})
    with pytest.raises(TypeError):
        mlcc.Model(adapted.model, adapters={"style": 3})  # type: ignore[dict-item]


def test_names_that_nobody_has(adapted: Adapted) -> None:
    with mlcc.Model(adapted.model, threads=1, adapters={"style": adapted.style}) as model:
        for choose in (
            lambda: model.session(adapter="other"),
            lambda: model.session(adapter="model"),
            lambda: model.generate(PROMPT, adapter="other"),
        ):
            with pytest.raises(mlcc.AdapterError, match="the model has style"):
                choose()
        with pytest.raises(mlcc.AdapterError, match="other"):
            model.chat([{"role": "user", "content": "x"}], adapter="other")
        with pytest.raises(TypeError):
            model.generate(PROMPT, adapter=3)  # type: ignore[arg-type]


def test_a_state_belongs_to_its_adapter(adapted: Adapted, tmp_path: Path) -> None:
    with mlcc.Model(adapted.model, threads=1, adapters={"style": adapted.style}) as model:
        session = model.session(adapter="style")
        session.prefill([1, 2, 3])
        session.save(tmp_path / "state")
        with pytest.raises(mlcc.StateFileError):
            model.session().load(tmp_path / "state")
        again = model.session(adapter="style")
        again.load(tmp_path / "state")
        assert again.decode(4).tolist() == session.decode(4).tolist()


def test_adapters_come_and_go(adapted: Adapted) -> None:
    with mlcc.Model(adapted.model, threads=1) as model:
        plain = text(model)
        model.load_adapter("one", adapted.style)
        model.load_adapter("two", adapted.task, scale=2)
        texts = [text(model, adapter="one"), text(model, adapter="two")]
        assert len({plain, *texts}) == 3 and model.adapters == ["one", "two"]
        for name in ("one", "model"):
            with pytest.raises(mlcc.AdapterError):
                model.load_adapter(name, adapted.style)
        with pytest.raises(mlcc.AdapterError, match="all 2 slots"):
            model.load_adapter("three", adapted.style)
        session = model.session(adapter="one")
        first = session.prefill([1, 2]).tolist()
        model.unload_adapter("one")
        assert model.adapters == ["two"]
        with pytest.raises(mlcc.AdapterError, match="one"):
            model.unload_adapter("one")
        # The session has its slot still.
        with pytest.raises(mlcc.AdapterError, match="all 2 slots"):
            model.load_adapter("three", adapted.style)
        session.reset()
        assert session.prefill([1, 2]).tolist() == first
        session.close()
        model.load_adapter("three", adapted.style)
        assert text(model, adapter="three") == texts[0] and text(model, adapter="two") == texts[1]

    async def main() -> None:
        async with mlcc.AsyncEngine(adapted.model, threads=1) as engine:
            await engine.load_adapter("one", adapted.style)
            options: mlcc.Options = {**GREEDY, "adapter": "one"}
            stream = engine.stream(PROMPT, **options)
            assert "".join([piece.text async for piece in stream]) == texts[0]
            await engine.unload_adapter("one")
            with pytest.raises(mlcc.AdapterError):
                async for _ in engine.stream(PROMPT, adapter="one"):
                    pass

    asyncio.run(asyncio.wait_for(main(), 60))


def test_clients_load_adapters(adapted: Adapted) -> None:
    app = mlcc.asgi(adapted.model, threads=1, lora_dir=adapted.style.parent)

    async def main() -> None:
        async def change(what: str, **fields: str) -> int:
            body = json.dumps(fields).encode()
            return (await ask(app, "POST", f"/v1/{what}_lora_adapter", body))[0]

        assert await change("load", lora_name="style", lora_path="style") == 200
        assert await change("load", lora_name="other", lora_path="..") == 400
        request = json.dumps({"model": "style", "prompt": PROMPT, **GREEDY}).encode()
        status, body = await ask(app, "POST", "/v1/completions", request)
        assert status == 200
        with mlcc.Model(adapted.merged, threads=1) as merged:
            assert json.loads(body)["choices"][0]["text"] == text(merged)
        assert await change("unload", lora_name="style") == 200
        assert (await ask(app, "POST", "/v1/completions", request))[0] == 404
        await app.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))
