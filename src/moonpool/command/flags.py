"""Command-line flags made from the configuration's keys, so that YAML and flags cannot differ."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from moonpool.command.settings import Key, Raw, keys_of, read_config
from moonpool.errors import ConfigError

Command = Callable[..., int]
TOKEN_ENV = "MOONPOOL_CLUSTER_TOKEN"
API_KEY_ENV = "MOONPOOL_API_KEY"
MAX_TOKEN_CHARS = 1024

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with these keys; flags override it")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--cluster-token-file", metavar="FILE", help=f"holds the cluster's token (else ${TOKEN_ENV})"),
]


def with_flags(
    *sections: str,
    others: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    own: Mapping[str, object] | None = None,
) -> Callable[[Command], Callable[..., int]]:
    """Turn `command(config, token)` into a function whose parameters are the flags of these sections.

    `own`: further parameters of the command, all optional, with their annotations; they are no keys of the file.

    A YAML file may hold the keys of `others` sections too, and those of `without`, which are no flags of this command:
    so that one file serves every part of a cluster.
    """
    keys = {name: key for name, key in keys_of(sections).items() if name not in without}

    def decorate(command: Command) -> Callable[..., int]:
        def run(config: Path | None, cluster_token_file: Path | None, **flags: Raw) -> int:
            given = {key.name: flags[_parameter(key)] for key in keys.values()}
            mine = {name: flags[name] for name in own or {}}
            from moonpool.command.hardware import sized

            read = read_config(config, given, (*sections, *others))
            return command(sized(read), cluster_token(cluster_token_file), **mine)

        parameters = [_flag(key) for key in keys.values()]
        parameters.append(_keyword("config", ConfigFile))
        parameters.append(_keyword("cluster_token_file", TokenFile))
        parameters += [_keyword(name, annotation) for name, annotation in (own or {}).items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def cluster_token(file: Path | None) -> str | None:
    """The token from the file or the environment; None where neither gives one."""
    if file is None:
        return os.environ.get(TOKEN_ENV) or None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the cluster token in {file}: {getattr(e, 'strerror', 'not text')}") from None
    if not 0 < len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(f"{file} must hold a token of at most {MAX_TOKEN_CHARS} characters")
    return token


def api_key() -> str | None:
    """What a gateway that asks for keys is sent, from the environment alone; None where there is none."""
    return os.environ.get(API_KEY_ENV) or None


def key_hint(status: int) -> str:
    """What to do about an answer that refuses the key, or the lack of one; empty for any other."""
    return {
        401: f": set {API_KEY_ENV} to an admin key",
        403: f": the key in {API_KEY_ENV} is no admin key",
    }.get(status, "")


def _parameter(key: Key) -> str:
    """A name that cannot meet Python's or the wrapper's own."""
    return f"key_{key.field}"


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(key: Key) -> inspect.Parameter:
    panel = f"{key.section.capitalize()}"
    text = key.description if key.default in (None, "", ()) else f"{key.description} (default {_shown(key)})"
    if key.choices:
        text = f"{key.description}: {', '.join(key.choices)} (default {_shown(key)})"
    if key.is_switch:
        switch = typer.Option(f"--{key.name}/--no-{key.name}", help=text, rich_help_panel=panel)
        return _keyword(_parameter(key), Annotated[bool | None, switch])
    option = typer.Option(f"--{key.name}", metavar=_metavar(key), help=text, rich_help_panel=panel)
    return _keyword(_parameter(key), Annotated[str | None, option])


def _metavar(key: Key) -> str:
    if key.choices:
        return "NAME"
    if key.is_classes:
        return "FILE"
    if key.unit:
        return "SIZE" if key.unit == "bytes" else "DURATION"
    return "N" if isinstance(key.default, int | float) else "TEXT"


def _shown(key: Key) -> str:
    if key.unit == "bytes" and isinstance(key.default, int):
        return f"{key.default >> 20}MiB"
    if key.unit == "seconds":
        return f"{key.default:g}s"
    return "no" if key.default is False else str(key.default)
