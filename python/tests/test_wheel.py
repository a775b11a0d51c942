"""What is in the wheel, and the examples of the documentation."""

from __future__ import annotations

import doctest
import os
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import mlcc
import mlcc._asgi
import mlcc._async
import mlcc._build
import mlcc._model
import pytest
from conftest import WORKSPACE

MODULES = [mlcc, mlcc._model, mlcc._async, mlcc._asgi, mlcc._build]


def test_it_is_small_and_has_no_compiler() -> None:
    path = os.environ.get("MLCC_WHEEL")
    if path is None:
        pytest.skip("MLCC_WHEEL names no wheel")
    assert os.path.getsize(path) < 15 << 20
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        native = [name for name in names if name.endswith(".so")]
        assert len(native) == 1 and "abi3" in native[0]
        assert b"LLVM" not in wheel.read(native[0])
        assert "mlcc/py.typed" in names and "mlcc/_mlcc.pyi" in names


def test_crates_are_those_of_the_project() -> None:
    def versions(path: Path) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for package in tomllib.loads(path.read_text())["package"]:
            found.setdefault(package["name"], set()).add(package["version"])
        return found

    ours, project = versions(WORKSPACE / "python/Cargo.lock"), versions(WORKSPACE / "Cargo.lock")
    others = {name: sorted(ours[name] - project[name]) for name in ours if name in project}
    assert {name: found for name, found in others.items() if found} == {}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_of_docstrings(
    module: ModuleType, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(books.parent)
    found = doctest.testmod(module)
    assert found.failed == 0
    if module is not mlcc:
        assert found.attempted > 0


def test_examples_of_the_guide(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (WORKSPACE / "docs/python.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(examples) > 3
    monkeypatch.chdir(books.parent)
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), {"__name__": "example"})


def test_all_that_is_public_has_a_docstring() -> None:
    for name in mlcc.__all__:
        value = getattr(mlcc, name)
        assert value.__doc__, name
        if isinstance(value, type) and value.__module__.startswith("mlcc"):
            for field, member in vars(value).items():
                if not field.startswith("_") and callable(member) and name not in ("Floats",):
                    assert member.__doc__, f"{name}.{field}"
