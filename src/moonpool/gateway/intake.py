"""From a request's body to the jobs that the cluster is asked for: parsing, template, tokens, keys, limits.

All of it may take long (a prompt of a megabyte: half a second), so it runs on threads and not on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from moonpool.core.vocabulary import Chain, KeySpace
from moonpool.gateway.answers import AnswerMemory, conversation_ids
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.fields import INT64_MAX, read_object
from moonpool.gateway.generation import chains_of
from moonpool.gateway.problem import invalid
from moonpool.gateway.schema import (
    Ask,
    Limits,
    Messages,
    TokenizeRequest,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.messages import Sampling

THREADS = 2

T = TypeVar("T")


class Prompt(Struct, frozen=True):
    """One choice to be made."""

    tokens: tuple[int, ...]
    chains: tuple[Chain, ...]
    sampling: Sampling


class Intended(Struct, frozen=True):
    """One HTTP request, ready for the cluster."""

    ask: Ask
    prompts: tuple[Prompt, ...]


class Intake:
    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer, answers: AnswerMemory) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._answers = answers
        self._limits = Limits(config.served_model_name, tokenizer.vocabulary, config.max_prompts)
        self._threads = ThreadPoolExecutor(THREADS, "intake")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def chat(self, body: bytes, context_tokens: int, spaces: Sequence[KeySpace]) -> Intended:
        """Raises ApiError, like the other methods."""
        request = read_chat(read_object(body), self._limits)
        ids = self.conversation(request.ask.salt, request.messages)
        return Intended(request.ask, (self._prompt(ids, "messages", request.ask, context_tokens, spaces),))

    def completion(self, body: bytes, context_tokens: int, spaces: Sequence[KeySpace]) -> Intended:
        request = read_completion(read_object(body), self._limits)
        prompts = []
        for i, prompt in enumerate(request.prompts):
            ids = self._tokenizer.encode(prompt, special_tokens=True) if isinstance(prompt, str) else prompt
            where = "prompt" if len(request.prompts) == 1 else f"prompt[{i}]"
            prompts.append(self._prompt(ids, where, request.ask, context_tokens, spaces))
        return Intended(request.ask, tuple(prompts))

    def tokenize(self, body: bytes) -> tuple[list[int], TokenizeRequest]:
        request = read_tokenize(read_object(body), self._limits)
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt, special_tokens=request.special_tokens), request
        text = self._tokenizer.render(request.prompt, generation_prompt=request.generation_prompt)
        return self._tokenizer.encode(text, special_tokens=request.special_tokens), request

    def detokenize(self, body: bytes) -> str:
        tokens = read_detokenize(read_object(body), self._limits)
        return self._tokenizer.decode(tokens, skip_special=False)

    def conversation(self, salt: str, messages: Messages) -> list[int]:
        return conversation_ids(self._tokenizer, messages, self._answers.recall_all(salt, messages))

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
        code = "context_length_exceeded"
        if prompt >= context:
            message = (
                f"{where} has {prompt} tokens, and the context of this model is {context} tokens, prompt and output"
            )
            raise invalid(where.partition("[")[0], message, code)
        if ask.max_tokens is None:
            return min(context - prompt, self._config.default_max_tokens)
        if prompt + ask.max_tokens > context:
            message = (
                f"{where} has {prompt} tokens and max_tokens is {ask.max_tokens}: {prompt + ask.max_tokens} in all, "
                f"but the context of this model is {context} tokens"
            )
            raise invalid(where.partition("[")[0], message, code)
        return ask.max_tokens
