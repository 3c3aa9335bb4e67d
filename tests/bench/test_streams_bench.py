"""What `make bench-streams` holds each stream to."""

from __future__ import annotations

from moonpool.bench.endpoint import Reply
from moonpool.bench.streams import ENGINE, HARDWARE, SHRINK_KV, Got, open_at_once, wrong
from moonpool.command.hardware import hardware_profile, timed_config
from moonpool.engine.timed import reference_tokens

PROMPTS = [(1, 2, 3), (1, 2, 4)]
RIGHT = [reference_tokens(p, 4, ENGINE) for p in PROMPTS]


def got(prompt: tuple[int, ...], ids: list[int], begins: float = 1.0, ends: float = 2.0) -> Got:
    return Got(prompt, 4, 0.0, Reply(ends, 200, times=(begins,) * len(ids), completed=True), tuple(ids))


def test_the_references_are_of_the_engine_that_the_cluster_runs() -> None:
    engine = timed_config(hardware_profile(HARDWARE, shrink_kv=SHRINK_KV))
    assert (engine.layers, engine.words_per_half, engine.vocabulary) == (
        ENGINE.layers,
        ENGINE.words_per_half,
        ENGINE.vocabulary,
    )


def test_streams_that_were_mixed_up_or_cut_short_are_found() -> None:
    assert wrong([got(*pair) for pair in zip(PROMPTS, RIGHT, strict=True)]) == 0
    assert wrong([got(*pair) for pair in zip(PROMPTS, reversed(RIGHT), strict=True)]) == 2
    lost = RIGHT[0][:1] + RIGHT[0][2:]
    assert wrong([got(PROMPTS[0], lost)]) == 1
    assert not got(PROMPTS[0], RIGHT[0][:3]).complete
    assert got(PROMPTS[0], RIGHT[0]).complete


def test_only_a_refusal_that_says_why_and_when_to_come_again_is_one() -> None:
    def refused(reply: Reply) -> bool:
        return Got(PROMPTS[0], 4, 0.0, reply, ()).refused

    assert refused(Reply(1.0, 429, "queue-full", retry_after=1.0))
    assert not refused(Reply(1.0, 429, "queue-full"))
    assert not refused(Reply(1.0, 429, "HTTP 429", retry_after=1.0))
    assert not refused(Reply(1.0, 500, "queue-full", retry_after=1.0))
    assert not refused(Reply(1.0, 0, "connection lost"))


def test_streams_are_open_from_their_first_token_to_their_end() -> None:
    ids = RIGHT[0]
    assert open_at_once([got(PROMPTS[0], ids, 1.0, 3.0), got(PROMPTS[0], ids, 2.0, 4.0)]) == 2
    assert open_at_once([got(PROMPTS[0], ids, 1.0, 2.0), got(PROMPTS[0], ids, 2.0, 4.0)]) == 1
    assert open_at_once([got(PROMPTS[0], [])]) == 0
