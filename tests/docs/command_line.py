"""`moonpool` as its own parser reads it, without doing anything."""

from __future__ import annotations

from typing import Any

import typer.main

from moonpool.cli import app
from moonpool.command.hardware import sized
from moonpool.command.settings import read_config

GROUP: Any = typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """The words after `moonpool`: commands, flags and values, keys of the configuration included.

    Raises what the command would.
    """
    command, words = GROUP, list(words)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        return
    given = command.make_context(command.name, words).params
    keys = {each.opts[0][2:]: given[each.name] for each in command.params if each.name.startswith("key_")}
    sized(read_config(None, keys))


def flags_of(command: Any = GROUP) -> set[str]:
    """And of all that are below it."""
    below = getattr(command, "commands", {}).values()
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*(flags_of(each) for each in below))
