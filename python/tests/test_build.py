"""Compiling through the program `mlcc`."""

from __future__ import annotations

import os
from pathlib import Path

import mlcc
import pytest
from conftest import BOOKS


def test_a_model_is_compiled(tmp_path: Path) -> None:
    said: list[str] = []
    report = mlcc.build(BOOKS, tmp_path / "books.so", quant="keep", flags=["--no-report", "-v"], on_progress=said.append)
    assert report["model"] == "rwkv4-tiny-books" and report["memory"]["weights_bytes"] > 0
    assert said
    with mlcc.Model(tmp_path / "books.so", threads=1) as model:
        assert model.inspect()["bytes"]["weights"] == report["memory"]["weights_bytes"]


def test_errors_are_those_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mlcc.BuildError, match="q17"):
        mlcc.build(BOOKS, tmp_path / "x.so", quant="q17")
    with pytest.raises(mlcc.BuildError, match="missing"):
        mlcc.build(tmp_path / "missing", tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()
    with pytest.raises(mlcc.BuildError, match="cannot run"):
        mlcc.build(BOOKS, tmp_path / "x.so", program=tmp_path / "no-program")
    with pytest.raises(mlcc.BuildError, match="no JSON"):
        mlcc.build(BOOKS, tmp_path / "x.so", program="/bin/true")
    monkeypatch.delenv("MLCC", raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(mlcc.BuildError, match="search path"):
        mlcc.build(BOOKS, tmp_path / "x.so")


def test_what_stops_a_build_ends_the_program(tmp_path: Path) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mlcc.build(BOOKS, tmp_path / "x.so", flags=["--no-report", "-v"], on_progress=stop)
    assert not (tmp_path / "x.so").exists()
