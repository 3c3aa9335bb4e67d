"""Tokens to text and text to tokens, against the tokenizer's own whole decode."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from moonpool.errors import ModelError
from moonpool.gateway.answers import TOKENS_PER_ANSWER, AnswerMemory, conversation_ids
from moonpool.gateway.detokenizer import ChoiceText, Detokenizer, StopScanner
from moonpool.gateway.problem import ApiError
from moonpool.gateway.schema import ChatMessage
from moonpool.gateway.tokenizer import Tokenizer

PIECES = ["▁", "a", "b", "▁a", "▁the", "é", "日", "▁日本", "\ufffd", "x", "▁▁"]


@pytest.fixture(scope="session")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of the SentencePiece family: `▁` for spaces, raw bytes for what it lacks, first space dropped."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocabulary |= {piece: 258 + i for i, piece in enumerate(PIECES)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("fallback")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def spell(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()


@settings(max_examples=300)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 300)), max_size=40))
def test_parts_of_any_tokens_join_to_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert spell(Detokenizer(tokenizer), ids) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(ids=st.lists(st.integers(1, 257 + len(PIECES)), max_size=40))
def test_parts_of_any_tokens_join_to_the_whole_with_raw_bytes(fallback: Tokenizer, ids: list[int]) -> None:
    assert spell(Detokenizer(fallback), ids) == fallback.decode(ids)


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_text_comes_back_without_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, special_tokens=False)
    parts = [detokenizer.feed(token) for token in ids]
    assert "".join(parts) + detokenizer.flush() == tokenizer.decode(ids)
    if tokenizer.decode(ids) == text and "\ufffd" not in text:  # the vocabulary lacks some bytes
        assert "\ufffd" not in "".join(parts)


def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("Hi 😀!", special_tokens=False)
    parts = [detokenizer.feed(t) for t in ids]
    assert parts[0] == "Hi"
    assert parts[-1] == "!"
    assert any(part.endswith("😀") for part in parts[:-1])
    assert detokenizer.flush() == ""


def test_an_answer_keeps_its_first_space(fallback: Tokenizer) -> None:
    context = fallback.encode("a", special_tokens=False)
    word = PIECES.index("▁the") + 258
    assert spell(Detokenizer(fallback, context), [word, word]) == " the the"
    assert spell(Detokenizer(fallback), [word, word]) == "the the"


def test_special_tokens_are_no_text(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b", special_tokens=False)
    assert len(ids) == 3
    assert spell(Detokenizer(tokenizer), ids) == "ab"
    euro = [2 + byte for byte in "€".encode()]
    assert spell(Detokenizer(fallback), [*euro[:2], 1, euro[2]]) == "€"


def test_bytes_of_tokens(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    for text in ("naïve 😀 日本", "a\n\tb"):
        ids = tokenizer.encode(text, special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    ids = fallback.encode("a é €", special_tokens=False)
    assert b"".join(map(fallback.token_bytes, ids)) == " a é €".encode()
    assert tokenizer.token_bytes(49152) == b""


# ---- stop strings


def cut(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first; None where there is none."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else None


@settings(max_examples=500)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 10**6),
)
def test_stop_strings_in_any_chunks(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    scanner = StopScanner(stops)
    given_out, rest = "", text
    while rest and not scanner.found:
        size = rng.randint(1, 4)
        given_out += scanner.feed(rest[:size])
        rest = rest[size:]
        assert text.startswith(given_out)
    expected = cut(text, stops)
    assert scanner.found == (expected is not None)
    assert given_out + scanner.flush() == (text if expected is None else expected)


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    scanner = StopScanner(["END", "##"])
    assert scanner.feed("some text E") == "some text "
    assert scanner.feed("N") == ""
    assert scanner.feed("T") == "ENT"
    assert scanner.feed("#") == ""
    assert scanner.flush() == "#"


@settings(max_examples=100)
@given(text=st.text("ab €日", max_size=20), stop=st.text("ab €日", min_size=1, max_size=3), least=st.integers(0, 5))
def test_an_answer_is_cut_after_its_first_tokens_only(tokenizer: Tokenizer, text: str, stop: str, least: int) -> None:
    ids = tokenizer.encode(text, special_tokens=False)
    choice = ChoiceText(tokenizer, (), [stop], least)
    said = ""
    for token in ids:
        said += choice.feed(token)
        if choice.stopped:
            break
    said += choice.finish()
    unscanned = Detokenizer(tokenizer)
    head = "".join(unscanned.feed(token) for token in ids[:least])
    tail = text[len(head) :]
    assert said == head + (tail if stop not in tail else tail[: tail.index(stop)])
    assert choice.stopped == (stop in tail)


# ---- answers


def turn(*texts: str) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))


def test_known_answers_keep_their_ids(tokenizer: Tokenizer) -> None:
    odd = [tokenizer.encode(c, special_tokens=False)[0] for c in "Hello"]
    prompt = conversation_ids(tokenizer, turn("Hi"), {}, 2048)
    again = conversation_ids(
        tokenizer, turn("Hi", "Hello", "And?", "Hello", "So?"), {1: tuple(odd), 3: tuple(odd)}, 2048
    )
    assert again[: len(prompt) + len(odd)] == [*prompt, *odd]
    plain = tokenizer.render(turn("Hi", "Hello", "And?", "Hello", "So?"))
    assert tokenizer.decode(again, skip_special=False) == plain
    assert again != tokenizer.encode(plain, special_tokens=False)
    assert conversation_ids(tokenizer, turn("Hi", "Hello"), {}, 2048) == tokenizer.encode(
        tokenizer.render(turn("Hi", "Hello")), special_tokens=False
    )


def test_a_template_that_changes_contents_is_tokenized_as_text(
    tokenizer: Tokenizer, smollm2: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2 / "tokenizer.json")
    for template in (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }},{% endfor %}",
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        other = Tokenizer.load(tmp_path)
        messages = turn("Hi", "Hello", "x", "Yes")
        expected = other.encode(other.render(messages), special_tokens=False)
        assert conversation_ids(other, messages, {1: (5, 6), 3: (7,)}, 2048) == expected


def test_the_memory_is_bounded_and_keeps_salts_apart() -> None:
    memory = AnswerMemory(3, ())
    for n in range(5):
        memory.remember("", f"text {n}", [n])
        memory.recall("", "text 2")
    assert [memory.recall("", f"text {n}") for n in range(5)] == [None, None, (2,), (3,), (4,)]
    assert memory.recall("salt", "text 2") is None
    memory.remember("salt", "text 2", [9])
    assert memory.recall("salt", "text 2") == (9,)
    memory.remember("", "long", range(3 * TOKENS_PER_ANSWER))
    assert len(memory) == 1
    memory.remember("", "too long", range(3 * TOKENS_PER_ANSWER + 1))
    assert memory.recall("", "too long") is None
    memory.check_integrity()


def test_the_memory_keeps_no_special_tokens() -> None:
    memory = AnswerMemory(3, {1, 2})
    memory.remember("", "text", [5, 2, 6])
    assert memory.recall("", "text") is None
    memory.remember("", "text", [5, 6])
    assert memory.recall("", "text") == (5, 6)


# ---- loading


def test_templates_and_what_they_may_refuse(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2 / "tokenizer.json")
    bare = Tokenizer.load(tmp_path)
    assert bare.vocabulary == 49152
    with pytest.raises(ApiError, match="no chat template"):
        bare.render(turn("Hi"))
    config: dict[str, object] = {
        "chat_template": "{{ bos_token }}{{ raise_exception('roles must alternate') }}",
        "bos_token": "<s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ApiError, match="roles must alternate"):
        Tokenizer.load(tmp_path).render(turn("Hi"))
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}!"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 50_000}}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render(turn("Hi")) == "<s>!"
    assert loaded.vocabulary == 50_000


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)
