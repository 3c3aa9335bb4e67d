"""Answers in OpenAI's two shapes, chat and completion, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from moonpool.gateway.choice import Choice, Delta, Drawn
from moonpool.gateway.schema import Ask
from moonpool.gateway.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class _Head(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Head):
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Head):
    """One event of a stream."""

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextCompletion(_Head):
    choices: list[TextChoice]
    usage: Usage


class TextCompletionChunk(_Head):
    """One event of a stream."""

    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


def usage_of(choices: Sequence[Choice]) -> Usage:
    prompt = sum(len(c.generation.job.prompt) for c in choices)
    output = sum(len(c.tokens) for c in choices)
    cached = sum(c.generation.cached_tokens for c in choices)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


class Shape:
    """How one request's answer is written."""

    def __init__(
        self, tokenizer: Tokenizer, *, id_: str, created: int, model: str, fingerprint: str, chat: bool, ask: Ask
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + id_
        self._created = created
        self._model = model
        self._fingerprint = fingerprint
        self._wants_usage = ask.include_usage
        self._wants_ids = ask.token_ids
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if ask.include_usage else b"]}\n\n"

    def whole(self, choices: Sequence[Choice], drawn: Sequence[Sequence[Drawn]]) -> bytes:
        """`drawn`: per choice, all its tokens with log probabilities."""
        usage = usage_of(choices)
        if self._chat:
            answers = [
                ChatChoice(
                    c.index, AssistantMessage("assistant", c.text), self._chat_logprobs(c, d), c.finish, *self._ids(c)
                )
                for c, d in zip(choices, drawn, strict=True)
            ]
            return _encode(ChatCompletion(*self._named("chat.completion"), answers, usage))
        texts = [
            TextChoice(c.index, c.text, self._text_logprobs(c, d), c.finish, *self._ids(c))
            for c, d in zip(choices, drawn, strict=True)
        ]
        return _encode(TextCompletion(*self._named("text_completion"), texts, usage))

    def _named(self, kind: str) -> tuple[str, str, int, str, str]:
        return self._id, kind, self._created, self._model, self._fingerprint

    def _ids(self, choice: Choice) -> tuple[list[int] | UnsetType, tuple[int, ...] | UnsetType]:
        return (choice.tokens, choice.generation.job.prompt) if self._wants_ids else (UNSET, UNSET)

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """What comes before the first text: the role, in a chat."""
        if not self._chat:
            return b""
        first = ChatDelta(role="assistant", content="")
        return b"".join(self._chunk(ChatChunkChoice(c.index, first, None, None)) for c in choices)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        ids = delta.tokens if self._wants_ids else UNSET
        finish = delta.finish
        if self._chat:
            said = ChatDelta(content=delta.text) if delta.text or finish is None else ChatDelta()
            return self._chunk(
                ChatChunkChoice(choice.index, said, self._chat_logprobs(choice, delta.drawn), finish, ids)
            )
        return self._chunk(TextChoice(choice.index, delta.text, self._text_logprobs(choice, delta.drawn), finish, ids))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._wants_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage_of(choices)) + b"}\n\n" + DONE

    def _chunk(self, part: ChatChunkChoice | TextChoice) -> bytes:
        return self._head + _encode(part) + self._tail

    def _chat_logprobs(self, choice: Choice, drawn: Sequence[Drawn]) -> ChatLogprobs | None:
        if choice.generation.job.sampling.logprobs is None:
            return None
        return ChatLogprobs([self._entry(d) for d in drawn])

    def _entry(self, drawn: Drawn) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(drawn.token)
        top = [self._top(token, logprob) for token, logprob in drawn.top]
        return TokenLogprob(_text_of(raw), drawn.logprob, list(raw), top)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TopLogprob(_text_of(raw), logprob, list(raw))

    def _text_logprobs(self, choice: Choice, drawn: Sequence[Drawn]) -> TextLogprobs | None:
        if choice.generation.job.sampling.logprobs is None:
            return None
        tops = []
        for d in drawn:
            top: dict[str, float] = {}
            for token, logprob in (*d.top, (d.token, d.logprob)):
                top.setdefault(self._spelling(token), logprob)
            tops.append(top)
        return TextLogprobs(
            tokens=[self._spelling(d.token) for d in drawn],
            token_logprobs=[d.logprob for d in drawn],
            top_logprobs=tops,
            text_offset=[d.offset for d in drawn],
        )

    def _spelling(self, token: int) -> str:
        """Parts of characters are spelt `bytes:\\xe2\\x96`, as OpenAI does: two of them must not look the same here."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _text_of(raw: bytes) -> str:
    return raw.decode(errors="replace")
