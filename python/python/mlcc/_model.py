"""A loaded model for one thread, or several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from . import _errors
from ._mlcc import Answer, Core, Floats, Session, Stream

if TYPE_CHECKING:
    from types import TracebackType

Path = str | os.PathLike[str]
Adapter = Path | tuple[Path, float]
"""The folder of a LoRA adapter in PEFT format, or a folder and a scale."""
Json = dict[str, Any]


class Options(TypedDict, total=False):
    """Options of a text. What is left out is as the model's files say."""

    max_tokens: int | None
    """Most tokens; without it the text ends where the model, a stop string or the context ends it."""
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    """Of an equal seed comes an equal text."""
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    """Texts that end the text; they are not part of it."""
    ignore_eos: bool | None
    special: bool | None
    """Control tokens are shown by their names."""
    logprobs: int | None
    """How likely each token was, with so many of the likeliest."""
    json_schema: Mapping[str, Any] | str | None
    """The text is JSON that a schema admits."""
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    """A context-free grammar in llguidance's variant of Lark's syntax."""
    priority: int | None
    """Waiting texts of lower numbers begin first."""
    timeout: float | None
    """Seconds after which the text is ended."""
    adapter: str | None
    """The name of the adapter that the text is written with; without it none."""
    reuse: bool | None
    """Whether states of earlier texts may stand for the begin of the prompt."""


def prepared(options: Options) -> Json:
    """The options as the native part takes them."""
    values: Json = dict(options)
    schema = values.get("json_schema")
    if schema is not None and not isinstance(schema, str):
        values["json_schema"] = json.dumps(schema)
    return values


def listed(adapters: Mapping[str, Adapter]) -> list[tuple[str, str, float]]:
    """Adapters as the native part takes them."""
    pairs = ((name, value if isinstance(value, tuple) else (value, 1.0)) for name, value in adapters.items())
    return [(name, os.fspath(folder), scale) for name, (folder, scale) in pairs]


def load(
    models: Mapping[str, Path],
    *,
    adapters: Sequence[tuple[str, str, float]] = (),
    threads: int | None = None,
    cpu_level: str | None = None,
    template: str | None = None,
    sequences: int | None = None,
    max_queue: int = 64,
    memory: int | None = None,
    api_keys: Sequence[str] = (),
    body_limit: int = 8_000_000,
    timeout: float | None = None,
    lora_dir: Path | None = None,
) -> Core:
    """Loads models by the names that requests call them."""
    return Core(
        [(name, os.fspath(path)) for name, path in models.items()],
        adapters=list(adapters),
        threads=threads,
        cpu_level=cpu_level,
        template=template,
        sequences=sequences,
        max_queue=max_queue,
        memory=memory,
        api_keys=list(api_keys),
        body_limit=body_limit,
        timeout=timeout,
        lora_dir=None if lora_dir is None else os.fspath(lora_dir),
    )


def name_of(path: Path) -> str:
    """What requests call a model: its file's name without `.so`."""
    return os.path.splitext(os.path.basename(os.fspath(path)))[0] or "model"


def error_of(status: int, body: bytes) -> Exception:
    """The exception of an answer that is an error."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = body.decode("utf-8", "replace"), None
    kinds: dict[str | None, type[_errors.Error]] = {
        "model_not_found": _errors.AdapterError,
        "context_length_exceeded": _errors.ContextFull,
        "queue_full": _errors.QueueFull,
        "too_many_grammars": _errors.QueueFull,
        "invalid_grammar": _errors.GrammarError,
        "grammar_failed": _errors.GrammarError,
        "shutting_down": _errors.Closed,
    }
    if code in kinds:
        return kinds[code](message)
    return _errors.InternalError(message) if status >= 500 else _errors.InvalidRequest(message)


def chat_body(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    response_format: Mapping[str, Any] | None,
    adapter: str | None,
    stream: bool,
    fields: Mapping[str, Any],
) -> bytes:
    """The request of a chat, as `/v1/chat/completions` takes it."""
    body: Json = {"messages": list(messages), "stream": stream, **fields}
    if adapter is not None:
        # To the server an adapter is a model.
        body["model"] = adapter
    if tools is not None:
        body["tools"] = list(tools)
    if response_format is not None:
        body["response_format"] = dict(response_format)
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError) as error:
        raise _errors.InvalidRequest(f"the chat is not JSON: {error}") from None


CHAT = ("POST", "/v1/chat/completions", [(b"content-type", b"application/json")])


class Events:
    """Cuts the bytes of an event stream into its pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Json]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            piece: Json = json.loads(line[6:])
            if "error" in piece:
                raise error_of(500 if piece["error"].get("type") == "server_error" else 400, line[6:])
            yield piece


def _pieces(answer: Answer) -> Iterator[Json]:
    events = Events()
    try:
        for data in answer:
            yield from events.feed(data)
    finally:
        answer.close()


class Model:
    """A compiled model. It may be used from several threads; steps run without the GIL.

    >>> model = Model("model.so", threads=1)
    >>> ids = model.tokenize("The sea")
    >>> model.detokenize(ids)
    'The sea'
    >>> session = model.session()
    >>> session.prefill(ids).shape == (model.inspect()["vocab"],)
    True
    >>> model.close()

    `threads` are worker threads (without: one for each physical core), `cpu_level` is the name of a CPU level of the artifact, `template` a
    chat template in place of the model's own (a name, `plain`, or Jinja text), `sequences` how many texts run together, `max_queue` how many
    may wait beside them, `memory` bytes that may be used. `adapters` are LoRA adapters by the names that sessions and texts choose them by:
    folders in PEFT format, or pairs of a folder and a scale; of a model that was built with `--lora-slots`.
    """

    def __init__(
        self,
        path: Path,
        *,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        threads: int | None = None,
        cpu_level: str | None = None,
        template: str | None = None,
        sequences: int | None = None,
        max_queue: int = 64,
        memory: int | None = None,
    ) -> None:
        self._core = load(
            {name_of(path): path},
            adapters=listed(adapters),
            threads=threads,
            cpu_level=cpu_level,
            template=template,
            sequences=sequences,
            max_queue=max_queue,
            memory=memory,
        )

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """A text, piece by piece; `finished` of what is returned tells how it ended. Ctrl-C ends it.

        >>> with Model("model.so") as model:
        ...     stream = model.generate("The sea was", max_tokens=4, temperature=0, logprobs=1)
        ...     ids = [id for piece in stream for id in piece.ids]
        >>> len(ids), stream.finished.reason, stream.finished.completion_tokens
        (4, 'length', 4)
        """
        return self._core.generate(prompt, prepared(options))

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> Json: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: Literal[True],
        **fields: Any,
    ) -> Iterator[Json]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Json | Iterator[Json]:
        """An answer to messages, as `/v1/chat/completions` of `mlcc serve` gives it; `fields` are further fields of such a request. With
        `stream` its pieces, as they come.

        >>> with Model("model.so", template="plain") as model:
        ...     answer = model.chat([{"role": "user", "content": "The sea"}], max_tokens=4)
        >>> answer["choices"][0]["message"]["role"], answer["usage"]["completion_tokens"]
        ('assistant', 4)
        """
        answer = self._core.request(*CHAT, chat_body(messages, tools, response_format, adapter, stream, fields))
        if answer.status >= 400:
            raise error_of(answer.status, b"".join(answer))
        if stream:
            return _pieces(answer)
        whole: Json = json.loads(b"".join(answer))
        return whole

    def session(self, *, adapter: str | None = None) -> Session:
        """A sequence whose tokens the caller chooses; `adapter`: the name of the one that it goes through.

        >>> with Model("model.so") as model, model.session() as session:
        ...     logits = session.prefill(model.tokenize("The sea"))
        ...     with session.fork() as twin:
        ...         equal = twin.decode(5).tolist() == session.decode(5).tolist()
        ...     session.past, equal
        (3, True)
        """
        return self._core.session(adapter)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with the tokens that a prompt begins with."""
        return self._core.tokenize(text, special)

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; `special`: with the names of control tokens."""
        return self._core.detokenize(ids, special)

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_text: str | None = None,
        dim: int | None = None,
    ) -> Floats:
        """A vector for each text: a buffer of the shape (texts, numbers). `prompt` is the name of a prompt of the model that is put
        before each text, `prompt_text` such a text itself, `dim` takes so many first numbers."""
        return self._core.embed(_strings("texts", texts), prompt, prompt_text, dim)

    def rerank(self, query: str, documents: Sequence[str]) -> Floats:
        """How well each document answers the query; larger is better."""
        return self._core.rerank(query, _strings("documents", documents))

    def inspect(self) -> Json:
        """What is known of the model: sizes, limits, memory in bytes, and the artifact's metadata."""
        about: Json = json.loads(self._core.inspect())
        return about

    def load_adapter(self, name: str, path: Path, scale: float = 1.0) -> None:
        """Puts a LoRA adapter into a free slot, from the folder `path`; texts and sessions choose it by its name from then on."""
        self._core.load_adapter(name, os.fspath(path), scale)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Running texts and sessions keep it, and its slot is freed after the last of them."""
        self._core.unload_adapter(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters."""
        return self._core.adapters()

    @property
    def closed(self) -> bool:
        return self._core.closed

    def close(self) -> None:
        """Ends all texts. Sessions stay, and the weights with them, until they are closed."""
        self._core.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _strings(name: str, texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name} is one string, expected a list of strings")
    return list(texts)
