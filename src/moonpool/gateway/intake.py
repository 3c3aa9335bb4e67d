"""From a request's body to the jobs that the cluster is asked for: parsing, template, tokens, keys, limits.

All of it may take long (a prompt of a megabyte: half a second), so it runs on threads and not on the event loop; and
large bodies have a thread of their own, so that small ones need not wait for them. What is too long is known to be so
from its beginning: the work for one text is bounded by the limit that it must keep, not by the text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from moonpool.core.classes import BATCH
from moonpool.core.vocabulary import Chain, KeySpace
from moonpool.gateway.answers import AnswerMemory, conversation_ids
from moonpool.gateway.bodies import SMALL_BYTES, Body
from moonpool.gateway.caching.book import Held
from moonpool.gateway.caching.context import Context, packed_ids
from moonpool.gateway.caching.reference import HEADER, Reference
from moonpool.gateway.caching.schema import read_new_context
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.fields import INT64_MAX, Fields, read_object
from moonpool.gateway.generation import chains_of
from moonpool.gateway.keys.tenant import Tenant
from moonpool.gateway.problem import ApiError, beyond_context, invalid
from moonpool.gateway.schema import (
    Ask,
    Limits,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from moonpool.gateway.tokenizer import Tokenizer, TooLongError
from moonpool.gateway.turns import Check, Turns
from moonpool.wire.messages import Sampling

SMALL_THREADS = 2
LARGE_THREADS = 1
MOST_COUNTED = 1 << 16
"""Tokens that /tokenize and /detokenize take, and more where the context is longer."""

T = TypeVar("T")
Bytes = bytes | bytearray


class Prompt(Struct, frozen=True):
    """One choice to be made."""

    tokens: tuple[int, ...]
    chains: tuple[Chain, ...]
    sampling: Sampling


class Intended(Struct, frozen=True):
    """One HTTP request, ready for the cluster."""

    ask: Ask
    prompts: tuple[Prompt, ...]
    cache: Reference | None = None
    """The cached context that it begins with."""


class Wanted(Struct, frozen=True):
    """A context that is to be cached."""

    context: Context
    """Without id, node, sizes and times."""
    ttl: int
    priority: str


class Tokenized(Struct, frozen=True):
    ids: list[int]
    names: list[str] | None
    """As the vocabulary spells them, where that was asked for."""


class Intake:
    def __init__(
        self, config: GatewayConfig, tokenizer: Tokenizer, answers: AnswerMemory, find: Callable[[str, str], Held]
    ) -> None:
        """`find`: a cached context by its id and its owner's; raises ApiError."""
        self._config = config
        self._tokenizer = tokenizer
        self._answers = answers
        self._find = find
        self.limits = Limits(config.served_model_name, tokenizer.vocabulary, config.max_prompts, config.class_names)
        self._small = Turns("small requests", SMALL_THREADS, config.max_requests)
        self._large = Turns("large requests", LARGE_THREADS, max(config.max_requests // 2, 1))
        """Those that wait here have seats: half of the seats stay for the small ones."""

    @property
    def waiting(self) -> int:
        """Requests that have been read and wait for a thread."""
        return self._small.waiting + self._large.waiting

    def close(self) -> None:
        self._small.close()
        self._large.close()

    def check_integrity(self) -> None:
        self._small.check_integrity()
        self._large.check_integrity()

    async def run(self, body: Body, work: Callable[[Bytes, Check], T]) -> T:
        """`work` is one of the methods below. It is dropped when this is cancelled. Raises ApiError."""
        turns = self._small if len(body) <= SMALL_BYTES else self._large
        return await turns.run(body, work)

    # ---- on threads; all raise ApiError

    # `cache`: the cached context that the request names in a header.

    def chat(
        self,
        body: Bytes,
        check: Check,
        *,
        tenant: Tenant,
        cache: Reference | None,
        context_tokens: int,
        spaces: Sequence[KeySpace],
    ) -> Intended:
        request = read_chat(Fields(read_object(body)), self.limits)
        if cache is not None and request.cache is not None:
            raise invalid(HEADER, f"the header {HEADER} and the first message both name a cached context: give one")
        cache = cache or request.cache
        ask, messages = _as_of(tenant, request.ask), request.messages
        known: dict[int, tuple[int, ...]] = {}
        if cache is not None:
            context, ask = self._begin_with(cache, tenant, request.ask, ask)
            if not context.messages:
                raise _mismatch(cache, "a prompt: name it in a request to /v1/completions")
            messages, known = (*context.messages, *messages), dict(context.known)
        first = len(messages) - len(request.messages)
        recalled = self._answers.recall_all(ask.salt, request.messages)
        known |= {first + i: ids for i, ids in recalled.items()}
        check()
        try:
            ids = conversation_ids(self._tokenizer, messages, known, context_tokens - 1)
        except TooLongError as e:
            raise beyond_context("messages", e.count, context_tokens) from None
        return Intended(ask, (self._prompt(ids, "messages", ask, context_tokens, spaces),), cache)

    def completion(
        self,
        body: Bytes,
        check: Check,
        *,
        tenant: Tenant,
        cache: Reference | None,
        context_tokens: int,
        spaces: Sequence[KeySpace],
    ) -> Intended:
        request = read_completion(Fields(read_object(body)), self.limits, context_tokens)
        ask = _as_of(tenant, request.ask)
        before: tuple[int, ...] = ()
        if cache is not None:
            context, ask = self._begin_with(cache, tenant, request.ask, ask)
            if context.messages:
                raise _mismatch(cache, "messages: name it in a request to /v1/chat/completions")
            before = context.token_ids()
        prompts = []
        for i, prompt in enumerate(request.prompts):
            check()
            where = "prompt" if len(request.prompts) == 1 else f"prompt[{i}]"
            is_first = cache is None
            ids = self._ids(prompt, where, context_tokens, is_first) if isinstance(prompt, str) else prompt
            prompts.append(self._prompt((*before, *ids), where, ask, context_tokens, spaces))
        return Intended(ask, tuple(prompts), cache)

    def context(self, body: Bytes, check: Check, *, tenant: Tenant, context_tokens: int) -> Wanted:
        """A prefix that is to be cached: messages as the chat template writes them before an answer, or a prompt."""
        new = read_new_context(Fields(read_object(body)), self.limits, context_tokens)
        salt = tenant.cache_salt(new.salt)
        known: dict[int, tuple[int, ...]] = {}
        check()
        if new.messages:
            where, known = "messages", self._answers.recall_all(salt, new.messages)
            try:
                ids: Sequence[int] = conversation_ids(
                    self._tokenizer, new.messages, known, context_tokens - 1, generation_prompt=False
                )
            except TooLongError as e:
                raise beyond_context(where, e.count, context_tokens) from None
        else:
            where = "prompt"
            ids = self._ids(new.prompt, where, context_tokens) if isinstance(new.prompt, str) else new.prompt
        if len(ids) >= context_tokens:
            raise beyond_context(where, len(ids), context_tokens)
        context = Context(
            owner=tenant.rights.group,
            model=self.limits.model,
            vocabulary=self.limits.vocabulary,
            name=new.name,
            metadata=new.metadata,
            salt=salt,
            messages=new.messages,
            known=known,
            tokens=packed_ids(ids),
        )
        return Wanted(context, new.ttl, tenant.priority(new.priority or BATCH.name))

    def tokenize(self, body: Bytes, check: Check, *, context_tokens: int) -> Tokenized:
        request = read_tokenize(Fields(read_object(body)), self.limits)
        check()
        if isinstance(request.prompt, str):
            field, text = "prompt", request.prompt
        else:
            field = "messages"
            text = self._tokenizer.render(request.prompt, generation_prompt=request.generation_prompt)
        most = max(MOST_COUNTED, context_tokens)
        try:
            ids = self._tokenizer.encode_up_to(text, most, special_tokens=request.special_tokens)
        except TooLongError as e:
            raise invalid(field, f"{field} has {e.count} tokens, and at most {most} are counted") from None
        if len(ids) > most:
            raise invalid(field, f"{field} has {len(ids)} tokens, and at most {most} are counted")
        return Tokenized(ids, [self._tokenizer.token_name(i) for i in ids] if request.strings else None)

    def detokenize(self, body: Bytes, check: Check, *, context_tokens: int) -> str:
        tokens = read_detokenize(Fields(read_object(body)), self.limits, max(MOST_COUNTED, context_tokens))
        check()
        return self._tokenizer.decode(tokens, skip_special=False)

    def _begin_with(self, cache: Reference, tenant: Tenant, given: Ask, ask: Ask) -> tuple[Context, Ask]:
        """The context, and `ask` with its salt: else its blocks would not be found. `given`: what the request had."""
        context = self._find(cache.id, tenant.rights.group).context
        if given.salt and ask.salt != context.salt:
            raise invalid("cache_salt", "cache_salt is not that of the cached context: leave it out, it has its own")
        return context, replace(ask, salt=context.salt)

    def _ids(self, prompt: str, where: str, context_tokens: int, is_first: bool = True) -> list[int]:
        """`is_first`: nothing goes before it."""
        try:
            return self._tokenizer.encode_up_to(prompt, context_tokens - 1, special_tokens=is_first)
        except TooLongError as e:
            raise beyond_context(where, e.count, context_tokens) from None

    def _prompt(
        self, ids: Sequence[int], where: str, ask: Ask, context_tokens: int, spaces: Sequence[KeySpace]
    ) -> Prompt:
        if not ids:
            raise invalid(where, f"{where} is empty: it must have at least one token")
        most = self._max_tokens(len(ids), where, ask, context_tokens)
        if ask.sampling.min_tokens > most:
            raise invalid("min_tokens", f"min_tokens ({ask.sampling.min_tokens}) is more than the {most} that can come")
        tokens = tuple(ids)
        seed = secrets.randbits(63) & INT64_MAX if ask.seed is None else ask.seed
        return Prompt(tokens, chains_of(tokens, spaces, ask.salt), replace(ask.sampling, seed=seed, max_tokens=most))

    def _max_tokens(self, prompt: int, where: str, ask: Ask, context: int) -> int:
        if prompt >= context:
            raise beyond_context(where, prompt, context)
        if ask.max_tokens is None:
            return min(context - prompt, self._config.default_max_tokens)
        if prompt + ask.max_tokens > context:
            raise beyond_context(where, prompt, context, ask.max_tokens, ask.max_tokens_field)
        return ask.max_tokens


def _as_of(tenant: Tenant, ask: Ask) -> Ask:
    """What it comes to when this tenant asks for it. Raises ApiError."""
    return replace(ask, salt=tenant.cache_salt(ask.salt), priority=tenant.priority(ask.priority))


def _mismatch(cache: Reference, what: str) -> ApiError:
    return ApiError(400, f"the cached context {cache.id!r} was made of {what}", code="context_mismatch")
