"""Sessions and the buffers that they give."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import mlcc
import numpy
import pytest


def test_logits_are_read_where_they_lie(model: mlcc.Model) -> None:
    session = model.session()
    logits = session.prefill([1, 2, 3])
    array = numpy.asarray(logits)
    view = memoryview(logits)
    assert array.dtype == numpy.float32 and array.shape == (4096,) == logits.shape == view.shape
    assert view.readonly and not array.flags.writeable and view.format == "f"
    # One place, three ways to it.
    assert array.__array_interface__["data"][0] == numpy.asarray(view).__array_interface__["data"][0]
    assert array.tolist() == logits.tolist() and array[7] == logits[7] == logits[7 - 4096]
    assert logits.argmax() == int(array.argmax())
    with pytest.raises((ValueError, TypeError)):
        array[0] = 1
    with pytest.raises((BufferError, TypeError)):
        view[0] = 1
    with pytest.raises(IndexError):
        logits[4096]
    with pytest.raises(ValueError):
        array.setflags(write=True)


def test_logits_stay_while_the_session_goes_on(model: mlcc.Model) -> None:
    session = model.session()
    kept = [numpy.asarray(session.decode(token)) for token in range(1, 20)]
    copies = [array.copy() for array in kept]
    places = {array.__array_interface__["data"][0] for array in kept}
    assert len(places) == len(kept)
    session.prefill([1] * 100)
    session.close()
    model.close()
    del session
    gc.collect()
    for array, copy in zip(kept, copies, strict=True):
        assert (array == copy).all()


def test_memory_of_logits_is_used_again(model: mlcc.Model) -> None:
    session = model.session()
    places = set()
    for token in range(1, 50):
        logits = session.decode(token)
        places.add(numpy.asarray(logits).__array_interface__["data"][0])
    assert len(places) <= 4


def test_all_positions(model: mlcc.Model) -> None:
    tokens = [5, 6, 7, 8]
    rows = numpy.asarray(model.session().prefill(tokens, all=True))
    assert rows.shape == (4, 4096)
    session = model.session()
    for row, token in zip(rows, tokens, strict=True):
        assert numpy.allclose(row, numpy.asarray(session.decode(token)), atol=1e-4)


def test_a_session_goes_back_forks_and_is_saved(model: mlcc.Model, tmp_path: Path) -> None:
    session = model.session()
    assert session.logits is None and session.past == 0
    session.prefill([1, 2, 3, 4])
    expected = session.decode(5).tolist()
    session.truncate(4)
    assert session.logits is None and session.past == 4
    twin = session.fork()
    session.save(tmp_path / "state")
    assert twin.decode(5).tolist() == expected == session.decode(5).tolist()
    other = model.session()
    other.load(tmp_path / "state")
    assert other.past == 4 and other.decode(5).tolist() == expected
    other.reset()
    assert other.past == 0
    # What was fed before the fork is shared, the logits too.
    assert session.logits is not None
    assert session.fork().logits.tolist() == session.logits.tolist()
    memory = session.memory()
    assert memory["planned_state"] >= memory["token"] > 0


def test_wrong_use_is_refused(model: mlcc.Model, tmp_path: Path, books: Path) -> None:
    session: Any = model.session()
    wrong: list[tuple[Any, type[Exception]]] = [
        (lambda: session.prefill([]), mlcc.InvalidRequest),
        (lambda: session.prefill("text"), TypeError),
        (lambda: session.prefill([1, "a"]), TypeError),
        (lambda: session.prefill([4096]), mlcc.InvalidRequest),
        (lambda: session.decode(-1), mlcc.InvalidRequest),
        (lambda: session.decode(2**40), mlcc.InvalidRequest),
        (lambda: session.decode(None), TypeError),
        (lambda: session.prefill([1] * 513), mlcc.ContextFull),
        (lambda: session.truncate(1), mlcc.CannotTruncate),
        (lambda: session.truncate(-1), mlcc.InvalidRequest),
        (lambda: session.load(tmp_path / "missing"), FileNotFoundError),
        (lambda: session.save(tmp_path / "no" / "folder"), FileNotFoundError),
        (lambda: session.load(books), mlcc.StateFileError),
    ]
    for number, (call, kind) in enumerate(wrong):
        with pytest.raises(kind):
            call()
            pytest.fail(f"case {number}")
    assert session.past == 0 and len(session.decode(1)) == 4096
    with mlcc.Model(books, threads=1) as other, other.session() as recurrent:
        recurrent.prefill([1, 2, 3])
        with pytest.raises(mlcc.CannotTruncate):
            recurrent.truncate(1)
        recurrent.save(tmp_path / "other")
    with pytest.raises(mlcc.StateFileError):
        session.load(tmp_path / "other")


def test_one_session_in_several_threads(model: mlcc.Model) -> None:
    session = model.session()
    errors: list[BaseException] = []

    def feeds() -> None:
        try:
            for _ in range(20):
                numpy.asarray(session.decode(3)).sum()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=feeds) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and session.past == 80


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_ten_thousand_sessions_leave_nothing(model: mlcc.Model) -> None:
    def some(count: int) -> None:
        for number in range(count):
            session = model.session()
            session.decode(1 + number % 100)
            if number % 3 == 0:
                numpy.asarray(session.fork().decode(2))
            if number % 2 == 0:
                session.close()

    some(500)
    gc.collect()
    before = resident()
    some(10_000)
    gc.collect()
    grown = resident() - before
    # A session of this model has more than 16 KiB: 10 000 that stay would be 160 MiB.
    assert grown < 8 << 20, f"{grown} bytes"


def test_streams_leave_nothing(model: mlcc.Model) -> None:
    def some(count: int) -> None:
        for number in range(count):
            stream = model.generate([1 + number % 50], max_tokens=2, ignore_eos=True)
            for _ in stream:
                if number % 4 == 0:
                    break

    some(200)
    gc.collect()
    before = resident()
    some(1000)
    gc.collect()
    assert resident() - before < 8 << 20
