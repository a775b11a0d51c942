"""Texts of one model, from threads and with all options."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import mlcc
import pytest

GREEDY: mlcc.Options = {"temperature": 0, "max_tokens": 8}


def text(model: mlcc.Model, prompt: str | list[int], **options: Any) -> str:
    return "".join(piece.text for piece in model.generate(prompt, **options))


def test_pieces_have_text_ids_and_logprobs(books: Path) -> None:
    with mlcc.Model(books, threads=1) as model:
        stream = model.generate("The sea was", temperature=0, max_tokens=12, logprobs=2)
        pieces = list(stream)
        ids = [id for piece in pieces for id in piece.ids]
        assert len(ids) == 12
        assert "".join(piece.text for piece in pieces) == model.detokenize(ids)
        for piece in pieces:
            if not piece.ids:
                continue
            assert piece.logprobs is not None
            # What is greedy is the likeliest.
            assert piece.logprobs.id == piece.ids[0] == piece.logprobs.top[0][0]
            assert len(piece.logprobs.top) == 2
            assert -20 < piece.logprobs.logprob <= 0
        assert stream.finished is not None
        assert (stream.finished.reason, stream.finished.completion_tokens) == ("length", 12)
        assert list(stream) == []


def test_a_text_is_what_a_session_gives(model: mlcc.Model) -> None:
    prompt = model.tokenize("A house by the sea")
    ids = [id for piece in model.generate(prompt, **GREEDY) for id in piece.ids]
    with model.session() as session:
        logits = session.prefill(prompt)
        for id in ids:
            assert logits.argmax() == id
            logits = session.decode(id)


def test_equal_seeds_give_equal_texts(model: mlcc.Model) -> None:
    options = {"temperature": 1.0, "max_tokens": 20, "seed": 7}
    assert text(model, "The", **options) == text(model, "The", **options)
    assert text(model, "The", **options) != text(model, "The", **{**options, "seed": 8})


def test_grammars_bind_texts(model: mlcc.Model) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    assert 0 <= json.loads(text(model, "x", json_schema=schema, **options))["n"] <= 9
    assert text(model, "x", choice=["yes", "no"], **options) in ("yes", "no")
    assert text(model, "x", regex="[0-9]{3}", **options).isdigit()
    with pytest.raises(mlcc.GrammarError):
        model.generate("x", regex="(")
    with pytest.raises(mlcc.InvalidRequest, match="choose one"):
        model.generate("x", regex="a", json_object=True)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"temperature": -1.0}, mlcc.InvalidRequest, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot', expected a number"),
        ({"temperature": math.nan}, mlcc.InvalidRequest, "temperature"),
        ({"max_tokens": -1}, mlcc.InvalidRequest, "max_tokens is -1"),
        ({"max_tokens": 2**70}, mlcc.InvalidRequest, "max_tokens"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens"),
        ({"top_p": 2.0}, mlcc.InvalidRequest, "top_p"),
        ({"stop": ["a", 1]}, TypeError, "stop"),
        ({"stop": ""}, mlcc.InvalidRequest, "stop"),
        ({"logit_bias": {99999: 1.0}}, mlcc.InvalidRequest, "logit_bias"),
        ({"logit_bias": [1]}, TypeError, "logit_bias"),
        ({"timeout": -1.0}, mlcc.InvalidRequest, "timeout"),
        ({"seed": -1}, mlcc.InvalidRequest, "seed"),
        ({"json_schema": "{"}, mlcc.InvalidRequest, "EOF"),
        ({"tempreature": 1.0}, TypeError, "no option tempreature"),
    ],
)
def test_wrong_options_are_refused(model: mlcc.Model, options: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        model.generate("The", **options)
    assert text(model, "The", **GREEDY)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([], mlcc.InvalidRequest),
        ([4096], mlcc.InvalidRequest),
        ([-1], mlcc.InvalidRequest),
        ([2**40], mlcc.InvalidRequest),
        ([0.5], TypeError),
        (None, TypeError),
        (b"The", TypeError),
        ([1] * 513, mlcc.ContextFull),
    ],
)
def test_wrong_prompts_are_refused(model: mlcc.Model, prompt: Any, kind: Any) -> None:
    with pytest.raises(kind):
        next(model.generate(prompt, max_tokens=1))


def test_texts_end(model: mlcc.Model) -> None:
    stream = model.generate("The", temperature=0, logit_bias={0: 100.0})
    assert list(stream) == [] or stream.finished
    assert stream.finished is not None and stream.finished.reason == "eos"
    stream = model.generate([1] * 500, temperature=0, ignore_eos=True)
    assert sum(len(piece.ids) for piece in stream) >= 12
    assert stream.finished is not None and stream.finished.reason == "context"
    stream = model.generate("The", ignore_eos=True, timeout=0.05)
    list(stream)
    assert stream.finished is not None and stream.finished.reason in ("deadline", "context")
    first = text(model, "The", **GREEDY)
    cut = text(model, "The", stop=first[3:5], **GREEDY)
    assert cut == first[: first.index(first[3:5])]


def test_a_stream_that_is_left_ends_its_text(llama: Path) -> None:
    with mlcc.Model(llama, threads=1, sequences=1, max_queue=0) as model:
        for piece in model.generate("The", ignore_eos=True):
            break
        wait_for_a_place(model)
        with model.generate("The", ignore_eos=True) as stream:
            next(stream)
        assert list(stream) == []
        wait_for_a_place(model)
        stream = model.generate("The", ignore_eos=True)
        with pytest.raises(mlcc.QueueFull):
            model.generate("The")
        stream.close()
        wait_for_a_place(model)


def wait_for_a_place(model: mlcc.Model) -> None:
    for _ in range(1000):
        try:
            assert len(text(model, "The", **GREEDY)) > 0
            return
        except mlcc.QueueFull:
            time.sleep(0.01)
    pytest.fail("the place was not given back")


def test_threads_write_beside_each_other(model: mlcc.Model) -> None:
    alone = [text(model, f"Number {i}", **GREEDY) for i in range(8)]
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.setdefault(i, text(model, f"Number {i}", **GREEDY)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == alone


def test_the_gil_is_free_during_steps(books: Path) -> None:
    count = 0
    stop = threading.Event()

    def counts() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    with mlcc.Model(books, threads=1) as model, model.session() as session:
        thread = threading.Thread(target=counts)
        thread.start()
        before = count
        # One call that takes about a second: nothing of Python runs in this thread meanwhile.
        session.prefill([5] * 3000)
        after = count
        stop.set()
        thread.join()
    assert after > before


def test_use_after_close_is_refused(llama: Path) -> None:
    model = mlcc.Model(llama, threads=1)
    stream = model.generate("The", ignore_eos=True)
    session = model.session()
    next(stream)
    model.close()
    model.close()
    assert model.closed
    with pytest.raises(mlcc.Closed):
        for _ in stream:
            pass
    calls: list[Any] = [
        lambda: model.generate("The"),
        lambda: model.tokenize("The"),
        lambda: model.session(),
        lambda: model.inspect(),
        lambda: model.chat([{"role": "user", "content": "x"}]),
    ]
    for call in calls:
        with pytest.raises(mlcc.Closed):
            call()
    # It keeps the weights.
    assert len(session.prefill([1, 2])) == 4096
    session.close()
    session.close()
    with pytest.raises(mlcc.Closed):
        session.decode(1)


def test_close_while_threads_use_it(llama: Path) -> None:
    """Closing ends what runs in other threads, with an exception and nothing else."""
    model = mlcc.Model(llama, threads=1)
    errors: list[BaseException] = []
    started = threading.Barrier(5)

    def uses() -> None:
        started.wait()
        try:
            while True:
                for _ in model.generate("The", max_tokens=50, ignore_eos=True):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=uses) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.1)
    model.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 4 and all(isinstance(error, mlcc.Closed) for error in errors)


def test_chat(llama: Path) -> None:
    with mlcc.Model(llama, threads=1, template="chatml") as model:
        messages = [{"role": "user", "content": "The sea?"}]
        answer = model.chat(messages, max_tokens=5, temperature=0)
        whole = answer["choices"][0]["message"]["content"]
        pieces = list(model.chat(messages, max_tokens=5, temperature=0, stream=True))
        assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == whole
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = model.chat(messages, response_format=form, max_tokens=60)
        assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (1, 2)
        with pytest.raises(mlcc.InvalidRequest):
            model.chat(messages, temperature=-1)
        with pytest.raises(mlcc.InvalidRequest, match="JSON"):
            model.chat([{"role": "user", "content": object()}])
        with pytest.raises(mlcc.ContextFull):
            model.chat([{"role": "user", "content": "word " * 2000}])


def test_inspect(model: mlcc.Model) -> None:
    about = model.inspect()
    assert (about["vocab"], about["context"], about["threads"]) == (4096, 512, 1)
    assert about["bytes"]["weights"] > 0
    assert ".mlcc.weights" in {section["name"] for section in about["sections"]}
    assert about["metadata"]["model"]["type"] == "llama"


def test_vectors(embedder: Path) -> None:
    with mlcc.Model(embedder, threads=1) as model:
        vectors = model.embed(["the sea was old", "a house", "the sea was old"])
        assert vectors.shape[0] == 3 == len(vectors)
        rows = vectors.tolist()
        assert rows[0] == rows[2] != rows[1]
        assert math.isclose(sum(x * x for x in rows[0]), 1, rel_tol=1e-5)
        assert model.embed(["a"], dim=4).shape == (1, 4)
        assert model.tokenize("the sea")
        with pytest.raises(mlcc.InvalidRequest):
            model.embed(["a"], dim=0)
        with pytest.raises(mlcc.InvalidRequest):
            model.embed([" "])
        with pytest.raises(mlcc.InvalidRequest):
            model.rerank("a", ["b"])
        with pytest.raises(TypeError):
            model.embed("the sea")
        for call in (lambda: model.generate("the"), lambda: model.session()):
            with pytest.raises(mlcc.InvalidRequest):
                call()


def test_a_generator_makes_no_vectors(model: mlcc.Model) -> None:
    with pytest.raises(mlcc.InvalidRequest, match="not an embedding model"):
        model.embed(["a"])


def test_wrong_files(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mlcc.Model(tmp_path / "missing.so")
    (tmp_path / "text.so").write_text("no model")
    with pytest.raises(mlcc.InvalidArtifact):
        mlcc.Model(tmp_path / "text.so")
    whole = llama.read_bytes()
    (tmp_path / "half.so").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(mlcc.InvalidArtifact):
        mlcc.Model(tmp_path / "half.so")
    machine = bytearray(whole)
    # e_machine: the other one of x86-64 and AArch64.
    machine[18] = 183 if machine[18] == 62 else 62
    (tmp_path / "machine.so").write_bytes(bytes(machine))
    with pytest.raises((mlcc.WrongMachine, mlcc.InvalidArtifact)):
        mlcc.Model(tmp_path / "machine.so")
    for settings in ({"threads": 0}, {"threads": -1}, {"sequences": 2000}, {"max_queue": -1}, {"memory": 0}):
        with pytest.raises(mlcc.InvalidRequest):
            mlcc.Model(llama, **settings)  # type: ignore[arg-type]
    with pytest.raises(mlcc.OutOfMemory):
        mlcc.Model(llama, memory=1000)
    with pytest.raises(mlcc.WrongMachine):
        mlcc.Model(llama, cpu_level="z80")
    with pytest.raises(mlcc.InvalidRequest, match="chatml"):
        mlcc.Model(llama, template="nonsense")


def script(body: str, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body), *args], capture_output=True, text=True, timeout=timeout
    )


def test_ctrl_c_ends_a_text(llama: Path) -> None:
    body = """
        import signal, sys, mlcc
        # Where the tests run as a shell's background job, it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        model = mlcc.Model(sys.argv[1], threads=1)
        print("ready", flush=True)
        try:
            while True:
                for piece in model.generate("The", ignore_eos=True): pass
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(len(list(model.generate("The", max_tokens=3, ignore_eos=True))) > 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(body), str(llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        try:
            out, _ = running.communicate(timeout=30)
        finally:
            running.kill()
    assert out == "interrupted\nTrue\n"


def test_an_interpreter_may_end_while_texts_run(llama: Path) -> None:
    body = """
        import sys, threading, mlcc
        model = mlcc.Model(sys.argv[1], threads=1)
        streams = [model.generate("The", ignore_eos=True) for _ in range(4)]
        started = threading.Event()
        def uses():
            while True:
                for piece in model.generate("The", ignore_eos=True): started.set()
        threading.Thread(target=uses, daemon=True).start()
        started.wait()
        print("end")
    """
    done = script(body, str(llama))
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_forked_child_is_told_so(llama: Path) -> None:
    body = """
        import os, sys, mlcc
        model = mlcc.Model(sys.argv[1], threads=1)
        session = model.session()
        stream = model.generate("The", ignore_eos=True)
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: model.generate("x"), lambda: session.decode(1), lambda: next(stream), model.session):
                try:
                    call()
                except mlcc.Forked as error:
                    said.append("spawn" in str(error))
            print(said, flush=True)
            # Everything is given back in the usual way.
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(session.decode(1)), flush=True)
    """
    done = script(body, str(llama))
    assert done.stdout == "[True, True, True, True]\n3 4096\n", done.stderr


def test_a_model_beside_numpy_threads(model: mlcc.Model) -> None:
    numpy = pytest.importorskip("numpy")
    square = numpy.ones((300, 300), dtype=numpy.float32)
    for _ in range(3):
        assert (square @ square)[0, 0] == 300
        assert text(model, "The", **GREEDY)


def test_the_import_brings_little() -> None:
    done = script("import sys, mlcc; print(sorted({'asyncio', 'numpy', 'subprocess', 'torch'} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stderr
    assert os.path.exists(os.path.join(os.path.dirname(mlcc.__file__), "py.typed"))
