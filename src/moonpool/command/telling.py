"""A request's story in plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moonpool.core.why import Waiting, Weighing
from moonpool.wire.story import Fact, Moment, Story

MOST_CANDIDATES = 16
"""Of each table, the best ones and the chosen one."""
MARGIN = 14
"""Of lines without a time."""


def tell(story: Story) -> list[str]:
    """Seconds count from the request's arrival."""
    label = f" (x-request-id {story.label})" if story.label else ""
    lines = [f"request {story.request}{label}: {story.outcome}"]
    said = {(w.attempt, w.first_at) for w in story.waitings}
    events: list[tuple[float, int, list[str]]] = []
    for moment in story.moments:
        if moment.what == "held" and (moment.attempt, moment.at) in said:
            continue
        rank = 0 if moment.what in ("arrived", "taken over") else 3
        events.append((moment.at, rank, [_sentence(moment, story)]))
    events += [(w.first_at, 1, [_waiting(w, story.arrived_at)]) for w in story.waitings]
    events += [(w.at, 2, list(_weighing(w))) for w in story.weighings]
    for at, _, text in sorted(events, key=lambda event: event[:2]):
        lines.append(f"{at - story.arrived_at:10.3f} s  {text[0]}")
        lines += [" " * MARGIN + line for line in text[1:]]
    if story.left_out:
        lines.append(f"{story.left_out} events in between are left out")
    return lines


def _sentence(moment: Moment, story: Story) -> str:
    say = _SENTENCES.get(moment.what)
    facts = moment.facts
    text = say(facts) if say is not None else f"{moment.what}: {', '.join(f'{k} {v}' for k, v in facts.items())}"
    if moment.what == "prefill done":
        return text + _predicted(moment, story)
    return text


def _predicted(done: Moment, story: Story) -> str:
    weighed = [w for w in story.weighings if w.attempt == done.attempt and w.verdict == "placed"]
    chosen = [c for w in weighed[-1:] for c in w.prefill if c.id == w.chosen_prefill]
    return f", predicted {_s(chosen[0].compute_seconds)}" if chosen else ""


def _waiting(waiting: Waiting, arrived_at: float) -> str:
    if waiting.times == 1:
        return f"held: {waiting.reason}"
    return f"held: {waiting.reason} (looked at {waiting.times} times, last at {waiting.last_at - arrived_at:.3f} s)"


def _weighing(weighing: Weighing) -> Iterator[str]:
    limits = _limits(weighing.slo_ttft, weighing.slo_tbt)
    whole = weighing.waited_seconds + weighing.ttft_seconds
    yield (
        f"weighed by {weighing.policy}: first token predicted {_s(whole)} after arrival, "
        f"steps of {_s(weighing.tbt_seconds)}{limits}"
    )
    yield f"  {'prefill':14}{'queue':>9}{'hit':>10}{'fetch':>22}{'waits':>9}{'computes':>10}{'first token':>12}  decode"
    best = sorted(weighing.prefill, key=lambda c: (c.id != weighing.chosen_prefill, c.ttft_seconds, c.id))
    for c in best[:MOST_CANDIDATES]:
        mark = ">" if c.id == weighing.chosen_prefill else " "
        fetch = f"{c.fetch_blocks} of {c.fetch_from}" if c.fetch_blocks else "-"
        yield (
            f"{mark} {c.id:14}{_s(c.queue_seconds):>9}{f'{c.hit_blocks}/{weighing.blocks}':>10}{fetch:>22}"
            f"{_s(c.fetch_seconds):>9}{_s(c.compute_seconds):>10}{_s(c.ttft_seconds):>12}  {c.decode}"
        )
    yield from _more(len(weighing.prefill))
    yield f"  {'decode':14}{'step':>9}{'holds':>10}"
    steps = sorted(weighing.decode, key=lambda d: (d.id != weighing.chosen_decode, d.tbt_seconds, d.id))
    for d in steps[:MOST_CANDIDATES]:
        mark = ">" if d.id == weighing.chosen_decode else " "
        yield f"{mark} {d.id:14}{_s(d.tbt_seconds):>9}{f'{d.held_blocks}/{weighing.blocks}':>10}"
    yield from _more(len(weighing.decode))
    if weighing.verdict != "placed":
        yield f"  {weighing.verdict}: {weighing.reason}"


def _more(count: int) -> Iterator[str]:
    if count > MOST_CANDIDATES:
        yield f"  … and {count - MOST_CANDIDATES} more"


def _limits(ttft: float | None, tbt: float | None) -> str:
    known = [f"{name} {_s(limit)}" for name, limit in (("first token", ttft), ("step", tbt)) if limit is not None]
    return f" (limits: {', '.join(known)})" if known else " (no limits)"


def _arrived(facts: dict[str, Fact]) -> str:
    output = f", {facts['output_tokens']} of them output so far" if facts["output_tokens"] else ""
    priority = f", class {facts['priority']}" if facts["priority"] else ""
    return (
        f"arrived: {facts['prompt_tokens']} tokens{output}, at most {facts['max_output_tokens']} to come{priority}, "
        f"{_s(facts['time_left'])} left"
    )


def _placed(facts: dict[str, Fact]) -> str:
    fetched = f", {facts['fetched_blocks']} of them from {facts['fetched_from']}" if facts["fetched_blocks"] else ""
    return (
        f"placed on {facts['prefill']} and {facts['decode']}: {facts['hit_blocks']} blocks hit{fetched}, "
        f"first token expected {_s(facts['expected_ttft'])} after arrival"
    )


def _prefilled(facts: dict[str, Fact]) -> str:
    return (
        f"prefill done on {facts['instance']}: {facts['computed_tokens']} tokens in {_s(facts['compute_seconds'])}, "
        f"{facts['cached_tokens']} cached, {_s(facts['queue_seconds'])} in its queue"
    )


def _refused(facts: dict[str, Fact]) -> str:
    again = f" (retry after {_s(facts['retry_after'])})" if facts["retry_after"] is not None else ""
    return f"refused, {facts['reason']}: {facts['message']}{again}"


_SENTENCES: dict[str, Callable[[dict[str, Fact]], str]] = {
    "arrived": _arrived,
    "taken over": lambda f: f"taken over from an earlier Conductor, {_placed(f)}",
    "held": lambda f: f"held: {f['reason']}",
    "room asked": lambda f: f"{f['node']} is asked for room for {f['blocks']} whole blocks",
    "room confirmed": lambda f: f"{f['node']} has room; {f['lacking_blocks']} blocks must be sent there",
    "room refused": lambda f: f"{f['node']} has no room: {f['reason']}",
    "placed": _placed,
    "prefill done": _prefilled,
    "prefill failed": lambda f: f"prefill failed on {f['instance']}: {f['reason']}",
    "joined": lambda f: f"joined the batch of {f['instance']}",
    "decode refused": lambda f: f"{f['instance']} did not take it: {f['reason']}",
    "preempted": lambda f: f"preempted by {f['instance']}: its pages ran out",
    "placed again": lambda f: f"the attempt is over, the gateway is asked for the next: {f['reason']}",
    "refused": _refused,
    "cancelled": lambda f: f"cancelled: {f['reason']}",
    "finished": lambda f: f"finished on {f['instance']}: {f['output_tokens']} tokens, {f['reason']}",
}


def _s(seconds: Fact) -> str:
    """Seconds in three digits or more."""
    if not isinstance(seconds, int | float):
        return "?"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
