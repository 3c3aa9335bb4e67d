"""Served answers and their token ids, so that the next turn of a conversation has the same ids (DESIGN §4.7).

An answer tokenized again as text may give other ids than the model produced, and its blocks would not be found.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from moonpool.gateway.schema import Messages
from moonpool.gateway.tokenizer import Tokenizer, TooLongError

TOKENS_PER_ANSWER = 512
"""The memory holds at most this many tokens times its number of answers."""


class AnswerMemory:
    """(salt, text) -> token ids; the least recently used go first. Safe to use from several threads."""

    def __init__(self, answers: int, special: Collection[int]) -> None:
        """`special`: ids that are left out of text."""
        self._special = frozenset(special)
        self._most = answers
        self._most_tokens = answers * TOKENS_PER_ANSWER
        self._ids: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def remember(self, salt: str, text: str, ids: Sequence[int]) -> None:
        """`ids` decode to exactly `text`.

        Ids with special tokens among them are not kept: the text hides those, and a later prompt that quotes it would
        get turns of other roles that its sender cannot see.
        """
        if not text or not ids or len(ids) > self._most_tokens or not self._special.isdisjoint(ids):
            return
        with self._lock:
            self._tokens += len(ids) - len(self._ids.pop((salt, text), ()))
            self._ids[(salt, text)] = tuple(ids)
            while len(self._ids) > self._most or self._tokens > self._most_tokens:
                self._tokens -= len(self._ids.popitem(last=False)[1])

    def recall(self, salt: str, text: str) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._ids.get((salt, text))
            if ids is not None:
                self._ids.move_to_end((salt, text))
            return ids

    def recall_all(self, salt: str, messages: Messages) -> dict[int, tuple[int, ...]]:
        """Ids of the remembered assistant messages, by index."""
        found = {i: self.recall(salt, m.content) for i, m in enumerate(messages) if m.role == "assistant"}
        return {i: ids for i, ids in found.items() if ids is not None}

    def check_integrity(self) -> None:
        assert len(self._ids) <= self._most, "more answers than the bound"
        assert self._tokens == sum(map(len, self._ids.values())), "the count of remembered tokens is off"
        assert self._tokens <= self._most_tokens, "more tokens than the bound"


def conversation_ids(
    tokenizer: Tokenizer,
    messages: Messages,
    known: dict[int, tuple[int, ...]],
    most: int,
    *,
    generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the rendered conversation, with the ids of `known` messages (by index) in their places.

    The template is rendered with marks in their stead; if that changes anything but the contents themselves, the
    whole is tokenized as plain text. Raises TooLongError where a part of it shows that there are more than `most`.
    """
    plain = tokenizer.render(messages, generation_prompt=generation_prompt)
    pieces = _around(tokenizer, messages, list(known), plain, generation_prompt) if known else None
    if pieces is None:
        return tokenizer.encode_up_to(plain, most, special_tokens=False)
    ids: list[int] = []
    for piece, answer in zip(pieces, (*known.values(), ()), strict=True):
        if len(ids) > most:
            raise TooLongError(len(ids))
        if piece:
            ids += _encode_after(tokenizer, len(ids), piece, most)
        ids += answer
    return ids


def _encode_after(tokenizer: Tokenizer, before: int, text: str, most: int) -> list[int]:
    """`most` counts the tokens `before` too."""
    try:
        return tokenizer.encode_up_to(text, most - before, special_tokens=False)
    except TooLongError as e:
        raise TooLongError(before + e.at_least) from None


def _around(
    tokenizer: Tokenizer, messages: Messages, known: Sequence[int], plain: str, generation_prompt: bool
) -> list[str] | None:
    """What the template writes before, between and after the `known` messages; None if they do not appear as they are.

    `plain` is the rendered conversation.
    """
    nonce = secrets.token_hex(8)
    marks = {i: f"\ue000{nonce}.{i}\ue001" for i in known}
    marked = tokenizer.render(
        [replace(m, content=marks.get(i, m.content)) for i, m in enumerate(messages)],
        generation_prompt=generation_prompt,
    )
    pieces: list[str] = []
    at = 0
    for mark in marks.values():
        found = marked.find(mark, at)
        if found < 0:
            return None
        pieces.append(marked[at:found])
        at = found + len(mark)
    pieces.append(marked[at:])
    contents = [messages[i].content for i in known]
    joined = "".join(text for pair in zip(pieces, (*contents, ""), strict=True) for text in pair)
    return pieces if joined == plain else None
