"""The bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize (DESIGN §11).

What is harmless or neutral passes; what would change the answer and is not supported gives 400 naming it.
"""

from __future__ import annotations

from msgspec import Struct

from moonpool.gateway.caching.reference import Reference, read_reference
from moonpool.gateway.fields import INT64_MAX, Fields, is_integer
from moonpool.gateway.known import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS, MESSAGE_NEUTRAL, ROLES, SHARED
from moonpool.gateway.problem import ApiError, beyond_context, invalid
from moonpool.wire.messages import Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_SALT_CHARS = 256
MAX_PRIORITY_CHARS = 64
MAX_AUTHOR_CHARS = 256
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond them logits overflow."""
COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""


class ChatMessage(Struct, frozen=True):
    role: str
    content: str
    name: str = ""


Messages = tuple[ChatMessage, ...]


class Ask(Struct, frozen=True):
    """How both kinds of requests want to be answered. `sampling` lacks its seed and its number of tokens."""

    sampling: Sampling
    max_tokens: int | None
    """None: the rest of the context, within the gateway's default."""
    max_tokens_field: str | None
    """That gave `max_tokens`; None: it is the default."""
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    priority: str
    salt: str
    token_ids: bool
    """Answer with token ids beside the text, as vLLM does."""


class ChatRequest(Struct, frozen=True):
    messages: Messages
    ask: Ask
    cache: Reference | None = None
    """The cached context that goes before the messages."""


class CompletionRequest(Struct, frozen=True):
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or token ids."""
    ask: Ask


class TokenizeRequest(Struct, frozen=True):
    prompt: str | Messages
    special_tokens: bool
    generation_prompt: bool
    strings: bool


class Limits(Struct, frozen=True):
    """What a body is checked against."""

    model: str
    vocabulary: int
    """Token ids are below it."""
    max_prompts: int
    classes: tuple[str, ...] = ()
    """Priority classes; none: any name is taken."""


def read_chat(fields: Fields, limits: Limits) -> ChatRequest:
    check_model(fields, limits.model)
    fields.check_names({*SHARED, "messages", "max_completion_tokens", "top_logprobs"}, HARMLESS, CHAT_NEUTRAL)
    newer = fields.integer("max_completion_tokens", 1)
    older = fields.integer("max_tokens", 1)
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens", f"max_tokens ({older}) and max_completion_tokens ({newer}) differ: give only one")
    wants = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wants:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    most, named = (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    ask = _read_ask(fields, limits, most, None if most is None else named, (top or 0) if wants else None)
    cache = _read_cache(fields)
    return ChatRequest(read_messages(fields, first=int(cache is not None)), ask, cache)


def read_completion(fields: Fields, limits: Limits, context_tokens: int) -> CompletionRequest:
    """Token ids that are too many for the context are refused here, before each is looked at."""
    check_model(fields, limits.model)
    fields.check_names({*SHARED, "prompt"}, HARMLESS, COMPLETION_NEUTRAL)
    most = fields.integer("max_tokens", 1)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    named = None if most is None else "max_tokens"
    ask = _read_ask(fields, limits, COMPLETION_TOKENS if most is None else most, named, logprobs)
    return CompletionRequest(_read_prompts(fields, limits, context_tokens), ask)


def read_tokenize(fields: Fields, limits: Limits) -> TokenizeRequest:
    check_model(fields, limits.model)
    options = {"add_special_tokens", "add_generation_prompt", "return_token_strs"}
    fields.check_names({"model", "prompt", "messages", *options}, HARMLESS, {})
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        raise invalid("prompt", "give either prompt or messages")
    prompt: str | Messages
    if fields.get("messages") is not None:
        prompt = read_messages(fields)
    elif isinstance(text := fields.get("prompt"), str):
        prompt = text
    else:
        raise invalid("prompt", "prompt must be a string")
    return TokenizeRequest(
        prompt=prompt,
        special_tokens=fields.flag("add_special_tokens", isinstance(prompt, str)),
        generation_prompt=fields.flag("add_generation_prompt", True),
        strings=fields.flag("return_token_strs"),
    )


def read_detokenize(fields: Fields, limits: Limits, most: int) -> tuple[int, ...]:
    check_model(fields, limits.model)
    fields.check_names({"model", "tokens"}, HARMLESS, {})
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise invalid("tokens", "tokens must be an array of token ids")
    if len(tokens) > most:
        raise invalid("tokens", f"tokens has {len(tokens)} token ids, and at most {most} are taken")
    return _token_ids(tokens, "tokens", limits.vocabulary)


def read_messages(fields: Fields, first: int = 0) -> Messages:
    """From the `first` one on."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "messages must be a non-empty array")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"{len(messages)} messages are more than the limit of {MAX_MESSAGES}")
    if len(messages) <= first:
        raise invalid("messages", "messages must have at least one more message after that of the role cache")
    return tuple(_read_message(message, f"messages[{i}]") for i, message in enumerate(messages[first:], first))


def _read_cache(fields: Fields) -> Reference | None:
    """Of the first message, if that has the role cache."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return None
    message = Fields(messages[0], "messages[0].")
    if message.get("role") != "cache":
        return None
    message.check_names({"role", "content"}, (), {})
    content = message.get("content")
    if not isinstance(content, str):
        raise invalid("messages[0].content", "messages[0].content must be a string like cache_id=cache-…")
    return read_reference(content, "messages[0].content")


def check_model(fields: Fields, served: str) -> None:
    model = fields.get("model")
    if model is None or model == served:
        return
    if not isinstance(model, str):
        raise invalid("model", "model must be a string")
    raise ApiError(
        404,
        f"the model {model[:128]!r} does not exist here; this server has {served!r}",
        param="model",
        code="model_not_found",
    )


def _read_ask(
    fields: Fields, limits: Limits, max_tokens: int | None, max_tokens_field: str | None, logprobs: int | None
) -> Ask:
    min_tokens = fields.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        most = f"{max_tokens_field} ({max_tokens})" if max_tokens_field else f"max_tokens ({max_tokens} by default)"
        raise invalid("min_tokens", f"min_tokens ({min_tokens}) is more than {most}")
    top_k = fields.integer("top_k", -1)
    sampling = Sampling(
        seed=0,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_low=True),
        top_k=0 if top_k is None or top_k < 0 else top_k,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, *REPETITION_PENALTIES),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=_read_stop_tokens(fields, limits.vocabulary),
        logprobs=logprobs,
    )
    stream = fields.flag("stream")
    seed = fields.integer("seed", -INT64_MAX - 1)
    return Ask(
        sampling=sampling,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        seed=None if seed is None else seed & INT64_MAX,
        stop=_read_stop(fields),
        stream=stream,
        include_usage=_read_stream_options(fields, stream),
        priority=read_priority(fields, limits.classes),
        salt=fields.text("cache_salt", MAX_SALT_CHARS),
        token_ids=fields.flag("return_token_ids"),
    )


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop must be a string or an array of at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _read_stop_tokens(fields: Fields, vocabulary: int) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"stop_token_ids must be an array of at most {MAX_STOP_TOKENS} token ids")
    return _token_ids(value, "stop_token_ids", vocabulary)


def _read_stream_options(fields: Fields, stream: bool) -> bool:
    if fields.get("stream_options") is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    options = fields.sub("stream_options")
    options.check_names({"include_usage"}, (), {"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    return options.flag("include_usage")


def read_priority(fields: Fields, classes: tuple[str, ...]) -> str:
    value = fields.get("priority")
    if value is None:
        return ""
    if is_integer(value) and isinstance(value, int) and abs(value) <= INT64_MAX:
        return str(value)
    if isinstance(value, str) and 0 < len(value) <= MAX_PRIORITY_CHARS and value.isascii() and value.isprintable():
        if classes and value not in classes:
            raise invalid("priority", f"there is no priority class {value!r}; name one of {', '.join(classes)}")
        return value
    most = MAX_PRIORITY_CHARS
    raise invalid("priority", f"priority must be an integer or a class name of at most {most} visible characters")


def _read_message(message: object, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(where, f"{where} must be an object")
    fields = Fields(message, f"{where}.")
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = " (tools are not supported)" if role in ("tool", "function") else ""
        if role == "cache":
            hint = " (cache: in a chat request, and there only in the first message)"
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}{hint}")
    fields.check_names({"role", "content", "name"}, (), MESSAGE_NEUTRAL)
    return ChatMessage(
        ROLES[role], _read_content(fields.get("content"), f"{where}.content"), fields.text("name", MAX_AUTHOR_CHARS)
    )


def _read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(where, f"{where} must be a string or a non-empty array of text parts")
    return "\n".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(where, f"{where} must be an object")
    kind = part.get("type")
    if kind != "text":
        shown = f" ({kind[:64]!r} is not)" if isinstance(kind, str) else ""
        raise invalid(f"{where}.type", f"{where}.type: only parts of type 'text' are supported{shown}")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"{where}.text must be a string")
    return text


def _read_prompts(fields: Fields, limits: Limits, context_tokens: int) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise invalid("prompt", "prompt must be a string, an array of strings, token ids, or an array of token ids")
    if not prompt:
        raise invalid("prompt", "prompt is empty")
    if is_integer(prompt[0]):
        return (prompt_ids(prompt, "prompt", limits, context_tokens),)
    if len(prompt) > limits.max_prompts:
        raise invalid("prompt", f"{len(prompt)} prompts are more than the limit of {limits.max_prompts} a request")
    return tuple(_read_prompt(one, f"prompt[{i}]", limits, context_tokens) for i, one in enumerate(prompt))


def _read_prompt(prompt: object, where: str, limits: Limits, context_tokens: int) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise invalid(where, f"{where} must be a string or an array of token ids")
    return prompt_ids(prompt, where, limits, context_tokens)


def prompt_ids(values: list[object], where: str, limits: Limits, context_tokens: int) -> tuple[int, ...]:
    if len(values) >= context_tokens:
        raise beyond_context(where, len(values), context_tokens)
    return _token_ids(values, where, limits.vocabulary)


def _token_ids(values: list[object], where: str, vocabulary: int) -> tuple[int, ...]:
    ids = []
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocabulary:
            raise invalid(where, f"{where}[{i}] is not a token id: an integer from 0 to {vocabulary - 1}")
        ids.append(value)
    return tuple(ids)
