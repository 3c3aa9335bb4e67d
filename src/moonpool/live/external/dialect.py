"""vLLM's words: what it is asked for, what it streams, and what its metrics say. Nothing here waits or sends.

Shapes as of vLLM 0.32 (`entrypoints/openai/completion`, `v1/metrics/loggers.py`) and, for metrics, those before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from moonpool.core.vocabulary import KeySpace
from moonpool.errors import MoonpoolError
from moonpool.wire.messages import MAX_TRANSFER_BYTES, Sampling, Work

MOST_LINE_BYTES = 64 << 20
"""Of one event: the first one repeats the prompt's token ids."""
_TELL_SPACE = "moonpool_key_space"
"""As `connectors/scheduling.py` has it."""
_INT63 = (1 << 63) - 1
_MOST_DIGITS = 10
_NO_JSON = (msgspec.MsgspecError, RecursionError)
"""What reading it raises: the latter where it is nested deeper than anything is."""
_Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
_TOKEN_PREFIX = "token_id:"
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""New name, old name."""


_KEEP_FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's own proxies for prefill and decode ask for it."""


class FaultError(MoonpoolError):
    """The server is away or broken: it counts against it."""


class RefusedError(MoonpoolError):
    """The server does not take this request; that says nothing of the others."""

    def __init__(self, message: str, is_busy: bool = False) -> None:
        """`is_busy`: it may take it another time."""
        super().__init__(message)
        self.is_busy = is_busy


class Drawn(Struct, frozen=True):
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), best first."""


class Piece(Struct, frozen=True):
    """What one event brought."""

    drawn: tuple[Drawn, ...] = ()
    finish: str | None = None
    """`stop` or `length`."""
    cached_tokens: int | None = None
    is_last: bool = False
    transfer: bytes = b""
    """`kv_transfer_params`, for the server that goes on with it."""


class Load(Struct, frozen=True):
    """What a server says of itself; over all of its engines."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Share of its KV blocks in use."""
    blocks: int = 0
    """Of KV, 0 where it does not say."""
    block_tokens: int = 0
    """Likewise."""
    caches_prefixes: bool = True


class _Logprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    token_ids: list[_Token] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Told(Struct):
    moonpool_key_space: KeySpace | None = None


class _Error(Struct):
    message: str = ""
    code: int | str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class _Problem(Struct):
    """The body of an error: `error`, or all at the top as it was before."""

    error: _Error | None = None
    message: str = ""


class _Model(Struct):
    id: str
    max_model_len: Annotated[int, Meta(ge=1, lt=1 << 32)] | None = None


class _Models(Struct):
    data: list[_Model]


def body_of(
    work: Work,
    model: str,
    *,
    priorities: bool,
    only_first: bool,
    gives_transfer: bool = False,
    transfer: bytes = b"",
) -> dict[str, object]:
    """A completion that goes on from all of `work.tokens`. `only_first`: one token, whose KV nobody computes.

    `gives_transfer`: its KVCache is kept for another server; the answer, which comes whole, says where. `transfer`:
    what that answer said.
    """
    sampling, produced = work.sampling, len(work.tokens) - work.prompt_tokens
    body: dict[str, object] = {
        "model": model,
        "prompt": list(work.tokens),
        "max_tokens": 1 if only_first else sampling.max_tokens - produced,
        "min_tokens": 0 if only_first else max(sampling.min_tokens - produced, 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": seed_of(sampling, produced),
        "ignore_eos": sampling.ignore_eos or (only_first and sampling.min_tokens > produced),
        "stop_token_ids": list(sampling.stop_token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "request_id": f"{work.request}-{work.attempt}",
    }
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
    if work.salt:
        body["cache_salt"] = work.salt
    if priorities:
        body["priority"] = work.place.rank
    if gives_transfer:
        # Only a whole answer has it.
        del body["stream_options"]
        body |= {"stream": False, "kv_transfer_params": _KEEP_FOR_ANOTHER}
    elif transfer:
        body["kv_transfer_params"] = msgspec.Raw(transfer)
    return body


def space_question(model: str) -> dict[str, object]:
    """A completion of one token, whose answer has the key space of the server's connector."""
    body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0, "stream": False}
    return body | {"return_token_ids": True, "kv_transfer_params": {_TELL_SPACE: True}}


def space_in(transfer: bytes) -> KeySpace | None:
    """Of that answer's `kv_transfer_params`; None where it does not tell. Raises FaultError."""
    if not transfer:
        return None
    try:
        return msgspec.json.decode(transfer, type=_Told).moonpool_key_space
    except _NO_JSON as e:
        raise FaultError(f"its connector tells of its key space what is none: {e}") from None


def seed_of(sampling: Sampling, produced: int) -> int:
    """The seed itself for the first choice from its beginning: else the same draws would come again."""
    if not sampling.choice and not produced:
        return sampling.seed
    text = f"{sampling.seed} {sampling.choice} {produced}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") & _INT63


class Events:
    """Bytes of a stream in, pieces out."""

    def __init__(self, logprobs: int | None) -> None:
        """`logprobs`: as in `Sampling`."""
        self._most = logprobs
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Raises FaultError for what is not an event, or says that the server failed."""
        seen = len(self._rest)
        self._rest += data
        begin = 0
        while (end := self._rest.find(b"\n", max(seen, begin))) >= 0:
            line = bytes(self._rest[begin:end]).strip()
            begin = end + 1
            if line.startswith(b"data:"):
                yield self._piece(line[5:].strip())
        del self._rest[:begin]
        if len(self._rest) > MOST_LINE_BYTES:
            raise FaultError(f"it sends an event of more than {MOST_LINE_BYTES} bytes")

    def whole(self, data: bytes) -> Piece:
        """Of an answer that is no stream. Raises as `feed`."""
        return self._piece(data)

    def _piece(self, data: bytes) -> Piece:
        if data == b"[DONE]":
            return Piece(is_last=True)
        try:
            event = msgspec.json.decode(data, type=_Event)
        except _NO_JSON as e:
            raise FaultError(f"it sends what is no completion: {e}") from None
        if event.error is not None:
            raise FaultError(f"it failed: {event.error.message or event.error.code}")
        details = event.usage.prompt_tokens_details if event.usage is not None else None
        cached = details.cached_tokens if details is not None else None
        if not event.choices:
            return Piece(cached_tokens=cached)
        choice = event.choices[0]
        finish = choice.finish_reason
        if finish not in (None, "stop", "length"):
            raise FaultError(f"it ended the request: {finish}")
        transfer = bytes(event.kv_transfer_params)
        if len(transfer) > MAX_TRANSFER_BYTES:
            raise FaultError(f"it gives {len(transfer)} bytes of kv_transfer_params, more than {MAX_TRANSFER_BYTES}")
        return Piece(self._drawn(choice), finish, cached, transfer=b"" if transfer == b"null" else transfer)

    def _drawn(self, choice: _Choice) -> tuple[Drawn, ...]:
        if choice.token_ids is None:
            raise FaultError("it gives no token ids: vLLM 0.10.2 or later is needed")
        said = choice.logprobs if self._most is not None else None
        if said is None:
            return tuple([Drawn(token, None, ()) for token in choice.token_ids])
        if len(said.token_logprobs) != len(choice.token_ids):
            raise FaultError("its log probabilities are not those of its tokens")
        tops = said.top_logprobs or [None] * len(choice.token_ids)
        each = zip(choice.token_ids, said.token_logprobs, tops, strict=False)
        return tuple([Drawn(token, logprob, self._top(top)) for token, logprob, top in each])

    def _top(self, top: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
        """It adds the drawn token where that is not one of the best."""
        pairs = [(_token_of(name), logprob) for name, logprob in (top or {}).items()]
        pairs.sort(key=lambda pair: -pair[1])
        return tuple(pairs[: self._most])


def _token_of(name: str) -> int:
    number = name.removeprefix(_TOKEN_PREFIX)
    if number == name or not number.isdecimal() or len(number) > _MOST_DIGITS:
        raise FaultError(f"it names a token {name[:40]!r} in place of its id")
    return int(number)


def problem_in(body: bytes) -> str:
    """The message in an error's body, else its beginning."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except _NO_JSON:
        return body[:200].decode(errors="replace").strip()
    return (problem.error.message if problem.error is not None else "") or problem.message


def models_in(body: bytes) -> dict[str, int | None]:
    """Served names, and the context of each in tokens. Raises FaultError."""
    try:
        return {model.id: model.max_model_len for model in msgspec.json.decode(body, type=_Models).data}
    except _NO_JSON as e:
        raise FaultError(f"/v1/models is no list of models: {e}") from None


def load_in(text: str) -> Load:
    """Of the text of /metrics. What is not there stays at its default; engines of one server are added up.

    Raises FaultError for what are no numbers.
    """
    running = waiting = 0.0
    usages: list[float] = []
    blocks = block_tokens = 0
    caches = True
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels = found[1], found[2] or ""
        if name == "vllm:num_requests_running":
            running += _value(name, found[3])
        elif name == "vllm:num_requests_waiting":
            waiting += _value(name, found[3])
        elif name in _USAGE:
            usages.append(_value(name, found[3]))
        elif name == "vllm:cache_config_info":
            info = dict(_LABEL.findall(labels))
            blocks += _number(info.get("num_gpu_blocks"))
            block_tokens = _number(info.get("block_size"))
            caches = info.get("enable_prefix_caching") != "False"
    usage = sum(usages) / len(usages) if usages else 0.0
    return Load(int(running), int(waiting), min(max(usage, 0.0), 1.0), blocks, block_tokens, caches)


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise FaultError(f"/metrics: {name} is {text[:40]!r}")
    return value


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS else 0
