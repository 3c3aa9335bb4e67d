"""Token ids to text, token by token: no broken UTF-8, no text that a stop string will take back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moonpool.gateway.tokenizer import Tokenizer

CONTEXT_TOKENS = 4


class Detokenizer:
    """Yields the text of a growing sequence as soon as later tokens cannot change it.

    `context` are the tokens before the first one: some vocabularies drop a space at the very beginning of a text,
    which an answer is not. Whatever the tokens, the parts joined are the text of the whole sequence decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        """Where decoding depends on the tokens before: those of the text given last, then those that wait."""
        self._given = 0
        """Characters of the window's text that have been given out."""
        if not tokenizer.is_bytewise:
            self._window = [t for t in context[-CONTEXT_TOKENS:] if t not in tokenizer.special]
            self._given = len(tokenizer.decode(self._window))

    def feed(self, token: int) -> str:
        tokenizer = self._tokenizer
        if token in tokenizer.special:
            return ""
        if tokenizer.is_bytewise:
            return self._utf8.decode(tokenizer.token_bytes(token))
        self._window.append(token)
        # A run of raw bytes is one text, or one replacement character each: that shows only at its end.
        return "" if token in tokenizer.fallback_bytes else self._settle(1)

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        if self._tokenizer.is_bytewise:
            return self._utf8.decode(b"", final=True)
        return self._settle(0) if self._window else ""

    def _settle(self, keep: int) -> str:
        text = self._tokenizer.decode(self._window)
        new = text[self._given :]
        self._window = self._window[-keep:] if keep else []
        self._given = len(self._tokenizer.decode(self._window)) if keep else 0
        return new


class StopScanner:
    """Finds the stop string that is complete first (of two that end together, the longer) and cuts there."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The part of the text so far that no stop string can begin in any more."""
        if not self._stops or self.found:
            return "" if self.found else text
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found = True
            self._held = ""
            return text[: min(hits)[1]]
        hold = self._possible_start(text)
        self._held = text[hold:]
        return text[:hold]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


class ChoiceText:
    """The text of one answer. Stop strings count only in text of tokens after the first `min_tokens`."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context)
        self._scanner = StopScanner(stops)
        self._unscanned = min_tokens
        self.decoded = 0
        """Characters of all tokens so far, given out or held back."""

    @property
    def stopped(self) -> bool:
        return self._scanner.found

    def feed(self, token: int) -> str:
        """Text that is certain now. After a stop string there is none."""
        text = self._detokenizer.feed(token)
        self.decoded += len(text)
        if self._unscanned > 0:
            self._unscanned -= 1
            return text
        return self._scanner.feed(text)

    def finish(self) -> str:
        """What was held back, when the answer has ended."""
        if self.stopped:
            return ""
        text = self._scanner.feed(self._detokenizer.flush())
        return text if self.stopped else text + self._scanner.flush()
