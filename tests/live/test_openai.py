"""The official client against a default cluster."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster

pytestmark = pytest.mark.live
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def cluster(smollm2: object) -> Iterator[RunningCluster]:
    with running_cluster() as c:
        yield c


@pytest.fixture(scope="module")
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as c:
        yield c


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=FRANCE,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_decides_the_draw(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=24, temperature=1.2, seed=seed
        )
        return answer.choices[0].text

    assert say(7) == say(7)
    assert len({say(seed) for seed in range(5)}) > 1


def test_a_list_of_prompts_gives_a_choice_each(client: openai.OpenAI) -> None:
    prompts = ["The sun is", "Water is made of", "The sun is"]
    answer = client.completions.create(model="smollm2", prompt=prompts, max_tokens=8, temperature=0)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == answer.choices[2].text != answer.choices[1].text
    alone = client.completions.create(model="smollm2", prompt=prompts[1], max_tokens=8, temperature=0)
    assert answer.choices[1].text == alone.choices[0].text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model="smollm2", prompt="Count: one, two,", max_tokens=24, temperature=0)
    text = free.choices[0].text
    stop = text[5:9]
    cut = client.completions.create(
        model="smollm2", prompt="Count: one, two,", max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_name_the_drawn_token_and_the_best(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert "".join(t.token for t in content.content) == answer.choices[0].message.content
    for token in content.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs), "greedy draws the best"
        assert token.logprob <= 0


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.chat.completions.create(model="nosuch", messages=FRANCE)
