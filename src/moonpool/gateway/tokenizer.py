"""Text to token ids and back, and the chat template.

The `tokenizers` library is used directly: importing `transformers.AutoTokenizer` loads torch, which costs a gateway
280 MB and five seconds. Chat templates are rendered by transformers' own function, which does not need torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import jinja2
from tokenizers import Tokenizer as FastTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moonpool.errors import ModelError, MoonpoolError
from moonpool.gateway.problem import ApiError, invalid
from moonpool.gateway.schema import ChatMessage

_render = cast("Callable[..., tuple[list[str], list[object]]]", render_jinja_template)
"""Its own annotations are wrong."""

CHARS_PER_TOKEN = 8
"""Nearly no text has more; one that has costs a second look."""
MARGIN_TOKENS = 256
"""What follows a cut changes the few tokens before it (in no case seen more than 3)."""


class TooLongError(MoonpoolError):
    """A text has more tokens than it may have."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least
        self.count = f"at least {at_least}"


class Tokenizer:
    """One model's tokenizer. Its methods may be called from several threads."""

    def __init__(self, fast: FastTokenizer, template: str | None, tokens: dict[str, str], vocabulary: int) -> None:
        self._fast = fast
        self._template = template
        self._template_tokens = tokens
        self.vocabulary = vocabulary
        """Token ids are below it: the rows of the model's embedding."""
        decoders = _decoders(json.loads(fast.to_str())["decoder"])
        self.is_bytewise = decoders == {"ByteLevel"}
        """Decoding is joining the tokens' bytes, whatever stands before them."""
        added = fast.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        """Ids that are left out of text."""
        self._eats_spaces = any(token.lstrip for token in added.values())
        """Some tokens take all white space before them: how much that is in tokens is only known at its end."""
        self.fallback_bytes: dict[int, int] = {}
        """Tokens that are one raw byte of a character (`<0xE2>`)."""
        if "ByteFallback" in decoders:
            known = ((fast.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self.fallback_bytes = {token: byte for token, byte in known if token is not None}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a model's directory. Raises ModelError."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{directory} has no tokenizer.json: load its tokenizer with transformers and save it there"
            )
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as e:  # the library raises no narrower class
            raise ModelError(f"{file} is not a tokenizer: {e}") from None
        fast.no_truncation()
        fast.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        model = _read_json(directory / "config.json")
        nested = model.get("text_config")
        rows = model.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
        return cls(
            fast,
            _read_template(directory, config),
            _template_tokens(config),
            rows if isinstance(rows, int) else fast.get_vocab_size(),
        )

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids. As a batch of one: only batches let go of the interpreter lock, and 1 MB takes half a second."""
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
        return encoding.ids

    def encode_up_to(self, text: str, most: int, *, special_tokens: bool) -> list[int]:
        """Token ids of all of `text`. A text that is long for `most` tokens is first looked at in part.

        Raises TooLongError if a beginning of it has more than `most` tokens already. (A text that is a little too long
        is tokenized: its ids are more than `most`.)
        """
        reach = CHARS_PER_TOKEN * (most + MARGIN_TOKENS)
        while reach < len(text):
            beginning = text[:reach]
            if self._eats_spaces:
                beginning = beginning.rstrip()
            at_least = len(self.encode(beginning, special_tokens=False)) - MARGIN_TOKENS
            if at_least > most:
                raise TooLongError(at_least)
            reach *= 4
        return self.encode(text, special_tokens=special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Iterable[ChatMessage], *, generation_prompt: bool = True) -> str:
        """The conversation as the model wants to read it. Raises ApiError where the template refuses it."""
        if self._template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        chat = [{"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in messages]
        try:
            rendered, _ = _render(
                [chat], chat_template=self._template, add_generation_prompt=generation_prompt, **self._template_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            raise invalid("messages", f"the model's chat template refuses these messages: {e}") from None
        return rendered[0]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for inside a text; of a special token, its name."""
        if (byte := self.fallback_bytes.get(token)) is not None:
            return bytes([byte])
        name = self._fast.id_to_token(token)
        if name is None:
            return b""
        if self.is_bytewise:
            try:
                return bytes([_BYTE_OF[c] for c in name])
            except KeyError:
                return name.encode()
        return self.decode([token], skip_special=False).encode() if "▁" not in name else name.replace("▁", " ").encode()

    def token_name(self, token: int) -> str:
        """As the vocabulary spells it."""
        return self._fast.id_to_token(token) or ""


def _decoders(decoder: dict[str, object] | None) -> set[str]:
    """The kinds of decoders in a (nested) decoder."""
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        members = cast("list[dict[str, object]]", decoder["decoders"])
        return set().union(*(_decoders(member) for member in members))
    return {str(decoder["type"])}


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies spell a byte as the printable Latin-1 letter, others as the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_letter()


def _read_json(file: Path) -> dict[str, object]:
    """Empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as e:
        raise ModelError(f"{file} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _read_template(directory: Path, config: dict[str, object]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _template_tokens(config: dict[str, object]) -> dict[str, str]:
    """`bos_token` and the like, which templates may use."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
