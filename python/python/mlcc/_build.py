"""Compiling: the program `mlcc`, which has the compiler that this package does not have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import BuildError


def build(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    quant: str | None = None,
    target: str | None = None,
    flags: Sequence[str] = (),
    on_progress: Callable[[str], object] | None = None,
    program: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Compiles a model with `mlcc build --json`, and returns its report. `flags` are further flags of `mlcc build`; `on_progress` gets what the
    program says meanwhile, line by line; `program` is the program, without it that of the variable MLCC or of the search path.

    >>> try:
    ...     build("no-such-folder", "model.so")
    ... except BuildError as error:
    ...     print("no-such-folder" in str(error))
    True
    """
    found = os.fspath(program) if program is not None else os.environ.get("MLCC") or shutil.which("mlcc")
    if found is None:
        raise BuildError(
            "the program mlcc is not on the search path: install it (cargo install --path cli), or name it with "
            "program= or the variable MLCC"
        )
    command = [found, "build", "--model", os.fspath(model), "--output", os.fspath(output), "--json"]
    for flag, value in (("--quant", quant), ("--target", target)):
        command += [flag, value] if value is not None else []
    command += flags
    try:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"cannot run {found}: {error}") from error
    with running:
        try:
            report, said = _listen(running, on_progress)
        except BaseException:
            running.terminate()
            raise
    if running.returncode != 0:
        text = "\n".join(said).strip() or f"{found} build ended with status {running.returncode}"
        raise BuildError(text.removeprefix("error: "))
    try:
        value = json.loads(report)
    except ValueError as error:
        raise BuildError(f"{found} build --json gave no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BuildError(f"{found} build --json gave no report")
    return value


def _listen(
    running: subprocess.Popen[bytes], on_progress: Callable[[str], object] | None
) -> tuple[bytes, list[str]]:
    """Standard output as a whole, and the lines of standard error."""
    from threading import Thread

    assert running.stdout is not None and running.stderr is not None
    out, report = running.stdout, bytearray()
    reader = Thread(target=lambda: report.extend(out.read()), daemon=True)
    reader.start()
    said = []
    for line in running.stderr:
        text = line.decode("utf-8", "replace").rstrip()
        said.append(text)
        if on_progress is not None:
            on_progress(text)
    reader.join()
    return bytes(report), said
