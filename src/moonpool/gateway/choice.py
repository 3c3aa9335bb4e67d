"""One answer in the making: tokens in; text, log probabilities and a finish reason out."""

from __future__ import annotations

from msgspec import Struct

from moonpool.gateway.answers import AnswerMemory
from moonpool.gateway.detokenizer import CONTEXT_TOKENS, ChoiceText
from moonpool.gateway.generation import Completed, Generation
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.messages import TokenOut

TOKENS_PER_DELTA = 64
"""Most at once: with log probabilities a token can take kilobytes in the reader's buffer."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


class Drawn(Struct, frozen=True):
    """A token with its log probability, for `logprobs`."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int
    """Characters of the answer before it."""


class Delta(Struct, frozen=True):
    """What has become certain since the last one."""

    text: str
    tokens: tuple[int, ...]
    drawn: tuple[Drawn, ...]
    finish: str | None


class Choice:
    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        job = generation.job
        self.index = index
        self.generation = generation
        self.finish: str | None = None
        self.tokens: list[int] = []
        """Output tokens that the answer is made of; others may have come after a stop string."""
        self._wants_logprobs = job.sampling.logprobs is not None
        self._text = ChoiceText(tokenizer, job.prompt[-CONTEXT_TOKENS:], stops, job.sampling.min_tokens)
        self._given: list[str] = []
        self._ends_with_token = False

    @property
    def stopped(self) -> bool:
        """A stop string was found: the generation must be told."""
        return self._text.stopped

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._given)

    def advance(self) -> Delta | None:
        """Take what the generation has; None where there is nothing.

        Tokens whose text is not certain yet make a delta without text: a client that measures intervals sees each.
        """
        if self.finish is not None:
            return None
        parts: list[str] = []
        drawn: list[Drawn] = []
        before = len(self.tokens)
        for token in self.generation.take(TOKENS_PER_DELTA):
            self.tokens.append(token.token)
            if token.finish == "stop":  # the end token is no text
                self._ends_with_token = True
                break
            if self._wants_logprobs:
                drawn.append(self._drawn(token))
            parts.append(self._text.feed(token.token))
            if self._text.stopped:
                self.finish = "stop"
                break
        if self.finish is None and not self.generation.fresh and isinstance(self.generation.ending, Completed):
            parts.append(self._text.finish())
            self.finish = "stop" if self._text.stopped else self.generation.ending.reason
        text = "".join(parts)
        self._given.append(text)
        taken = tuple(self.tokens[before:])
        if not taken and self.finish is None:
            return None
        return Delta(text, taken, tuple(drawn), self.finish)

    def remember(self, answers: AnswerMemory) -> None:
        """Its ids, for the next turn, unless a stop string has cut the text in the middle of them."""
        if self.finish is not None and not self._text.stopped:
            ids = self.tokens[:-1] if self._ends_with_token else self.tokens
            answers.remember(self.generation.job.salt, self.text, ids)

    def _drawn(self, token: TokenOut) -> Drawn:
        top = tuple((t, _finite(p)) for t, p in token.top)
        return Drawn(token.token, _finite(token.logprob), top, self._text.decoded)


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None or not logprob > LOWEST_LOGPROB else min(logprob, 0.0)
