"""What can go wrong, by kind. Every message says what to do."""

from __future__ import annotations


class Error(Exception):
    """All errors of mlcc that have no class of Python's own."""


class InvalidArtifact(Error):
    """A file is no compiled model, or a damaged one."""


class WrongVersion(InvalidArtifact):
    """A model was built by an mlcc whose artifacts this one does not read."""


class WrongMachine(Error):
    """A model was built for another processor or device than there is here."""


class OutOfMemory(Error, MemoryError):
    """There is no memory for a model, its caches or its texts."""


class InvalidRequest(Error, ValueError):
    """A value is outside of what is possible."""


class GrammarError(InvalidRequest):
    """A grammar or schema cannot be enforced."""


class AdapterError(InvalidRequest):
    """An adapter is none, is for another base, or finds no slot; or there is none of a name."""


class ContextFull(Error):
    """More tokens than the model was built for."""


class CacheFull(Error):
    """All sequences together have used up the pages of the caches."""


class QueueFull(Error):
    """Too many texts wait already: try again later."""


class CannotTruncate(Error):
    """A sequence cannot roll back to where it was asked to."""


class StateFileError(Error):
    """A file is not a saved state of this model."""


class Closed(Error):
    """Something was used after it was closed, or closed while it was used."""


class Forked(Error, RuntimeError):
    """A model was used in a child process that was forked after it was loaded."""


class InternalError(Error):
    """An error of mlcc itself: please report it."""


class BuildError(Error):
    """`mlcc build` failed; the message is what it said."""
