"""Flags that take several values with commas between: one column of a report for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from moonpool.errors import ConfigError

P = TypeVar("P", bound=str)


def some_of(flag: str, text: str, known: Sequence[P]) -> list[P]:
    """Raises ConfigError for a word that is not known."""
    by_name = {str(policy): policy for policy in known}
    for word in _words(text):
        if word not in by_name:
            raise ConfigError(f"{flag} {word!r}: must be of {', '.join(by_name)}, with commas between")
    return list(dict.fromkeys(by_name[word] for word in _words(text)))


def numbers(flag: str, text: str, least: int) -> list[int]:
    """Raises ConfigError for what is no whole number from `least` on."""
    for word in _words(text):
        if not (word.isascii() and word.isdecimal() and int(word) >= least):
            raise ConfigError(f"{flag} {word!r}: must be whole numbers from {least} on, with commas between")
    return list(dict.fromkeys(int(word) for word in _words(text)))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
