"""Language models compiled by mlcc.

>>> import mlcc
>>> with mlcc.Model("model.so") as model:
...     text = "".join(piece.text for piece in model.generate("The sea was", max_tokens=8, temperature=0))
>>> len(text) > 0
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import (
    AdapterError,
    BuildError,
    CacheFull,
    CannotTruncate,
    Closed,
    ContextFull,
    Error,
    Forked,
    GrammarError,
    InternalError,
    InvalidArtifact,
    InvalidRequest,
    OutOfMemory,
    QueueFull,
    StateFileError,
    WrongMachine,
    WrongVersion,
)
from ._mlcc import Finished, Floats, Logprob, Piece, Session, Stream
from ._model import Model, Options

if TYPE_CHECKING:
    from ._asgi import Application, asgi
    from ._async import AsyncEngine, AsyncStream
    from ._build import build

__all__ = [
    "AdapterError",
    "Application",
    "AsyncEngine",
    "AsyncStream",
    "BuildError",
    "CacheFull",
    "CannotTruncate",
    "Closed",
    "ContextFull",
    "Error",
    "Finished",
    "Floats",
    "Forked",
    "GrammarError",
    "InternalError",
    "InvalidArtifact",
    "InvalidRequest",
    "Logprob",
    "Model",
    "Options",
    "OutOfMemory",
    "Piece",
    "QueueFull",
    "Session",
    "StateFileError",
    "Stream",
    "WrongMachine",
    "WrongVersion",
    "asgi",
    "build",
]

# Modules that need asyncio or subprocess, which take longer to import than all of the rest.
_LATER = {
    "Application": "_asgi",
    "asgi": "_asgi",
    "AsyncEngine": "_async",
    "AsyncStream": "_async",
    "build": "_build",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'mlcc' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
