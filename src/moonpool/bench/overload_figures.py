"""What `make bench-overload` makes of its answers: tables, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table

from moonpool.bench.open_loop import Answer, Lengths
from moonpool.bench.result import Bar, bar
from moonpool.core.vocabulary import Slo

ATTAINED_TARGET = 0.95
ANSWER_LIMIT_MS = 50.0
KEPT_TARGET = 0.99
BETTER_TARGET = 0.1
ALL = "all"


class Comeback(Struct, frozen=True):
    """One that was refused and came again."""

    patience: float
    """The share of `Retry-After` that it waited."""
    answer: Answer


class Row(Struct, frozen=True):
    """Of some answers; a share is None where there is nothing that it could be of."""

    sent: int
    accepted: int
    attained: int
    failed: int
    """Accepted, and not completed."""
    reasons: dict[str, int]
    """Of refusals."""
    answered_ms: tuple[float, float] | None
    """Of refusals: median and 99th percentile."""
    retry_after: tuple[float, float, float] | None
    """Least, median and most, seconds."""
    without_advice: int
    """Refusals that do not say when to come again."""
    lag_ms: float
    """99th percentile of what the client itself was late in sending."""

    @property
    def attained_of_accepted(self) -> float | None:
        return self.attained / self.accepted if self.accepted else None

    @property
    def attained_of_sent(self) -> float:
        return self.attained / self.sent if self.sent else 0.0


def row_of(answers: Sequence[Answer]) -> Row:
    refused = [a for a in answers if a.refused]
    accepted = [a for a in answers if not a.refused]
    reasons: dict[str, int] = {}
    for a in refused:
        reasons[a.reason] = reasons.get(a.reason, 0) + 1
    times = [1e3 * a.answered for a in refused]
    advice = [a.retry_after for a in refused if a.retry_after is not None]
    return Row(
        sent=len(answers),
        accepted=len(accepted),
        attained=sum(a.attains for a in accepted),
        failed=sum(not a.completed for a in accepted),
        reasons=dict(sorted(reasons.items())),
        answered_ms=(percentile(times, 50), percentile(times, 99)) if times else None,
        retry_after=(min(advice), percentile(advice, 50), max(advice)) if advice else None,
        without_advice=len(refused) - len(advice),
        lag_ms=percentile([1e3 * a.sent for a in answers], 99) if answers else 0.0,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest that is not below so many of them. Raises IndexError for none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def by_bucket(answers: Sequence[Answer], buckets: Sequence[Lengths]) -> list[tuple[str, Row]]:
    """Each that has any, and all together."""
    rows = [(bucket.name, [a for a in answers if a.asked.bucket == at]) for at, bucket in enumerate(buckets)]
    return [(name, row_of(found)) for name, found in (*rows, (ALL, list(answers))) if found]


def by_class(answers: Sequence[Answer]) -> list[tuple[str, Row]]:
    names = sorted({a.asked.priority for a in answers})
    return [(name, row_of([a for a in answers if a.asked.priority == name])) for name in names]


def table(title: str, rows: Sequence[tuple[str, Row]], limits: Sequence[Slo] = ()) -> Table:
    """`limits`: one for each of the first rows."""
    made = Table("prompt tokens" if limits else "class", title=title)
    if limits:
        made.add_column("limits: first token, between")
    for name in ("sent", "accepted", "attained of them", "refused"):
        made.add_column(name, justify="right")
    made.add_column("answered after: median, p99")
    made.add_column("Retry-After: least, median, most")
    made.add_column("reasons")
    for at, (name, row) in enumerate(rows):
        slo = limits[at] if at < len(limits) else None
        held = [
            "" if slo is None or slo.ttft is None or slo.tbt is None else f"{slo.ttft:.2f} s, {slo.tbt * 1e3:.0f} ms"
        ]
        share = row.attained_of_accepted
        times, after = row.answered_ms, row.retry_after
        made.add_row(
            name,
            *(held if limits else ()),
            str(row.sent),
            str(row.accepted),
            "" if share is None else f"{share:.1%}" + (f" ({row.failed} failed)" if row.failed else ""),
            str(row.sent - row.accepted),
            "" if times is None else f"{times[0]:.1f} ms, {times[1]:.1f} ms",
            "" if after is None else ", ".join(f"{seconds:.0f} s" for seconds in after),
            ", ".join(f"{reason} {count}" for reason, count in row.reasons.items()),
        )
    return made


def share_taken(comebacks: Sequence[Comeback], patience: float) -> float | None:
    found = [not c.answer.refused for c in comebacks if c.patience == patience]
    return sum(found) / len(found) if found else None


def comebacks_table(comebacks: Sequence[Comeback]) -> Table:
    made = Table("came again", "number", "accepted", title="those refused in the last seconds of an overload")
    names = {0.0: "at once", 1.0: "after Retry-After"}
    for patience in sorted({c.patience for c in comebacks}):
        number = sum(c.patience == patience for c in comebacks)
        name = names.get(patience, f"after {patience:g} of it")
        made.add_row(name, str(number), f"{share_taken(comebacks, patience):.0%}")
    return made


def overload_bars(engine: str, row: Row, comebacks: Sequence[Comeback]) -> list[Bar]:
    """`row`: of all answers at three times the 90 % point."""
    at_once, patient = share_taken(comebacks, 0.0), share_taken(comebacks, 1.0)
    better = None if at_once is None or patient is None else patient - at_once
    return [
        bar(f"{engine}: accepted at 3x the 90 % point that attain", row.attained_of_accepted, ATTAINED_TARGET),
        bar(
            f"{engine}: refusals answered, p99, ms",
            None if row.answered_ms is None else row.answered_ms[1],
            ANSWER_LIMIT_MS,
            at_most=True,
            reason="nothing was refused",
        ),
        bar(f"{engine}: refusals that do not say when to come again", float(row.without_advice), 0, at_most=True),
        bar(
            f"{engine}: share accepted of those that come again after Retry-After, less of those at once",
            better,
            BETTER_TARGET,
            reason="nothing was refused",
        ),
    ]


def class_bars(engine: str, usual: Row, overloaded: Row) -> list[Bar]:
    """Both of the high class, at the 90 % point and at twice it."""
    kept = overloaded.attained_of_sent / usual.attained_of_sent if usual.attained else None
    return [bar(f"{engine}: attainment that the high class keeps in 2x overload", kept, KEPT_TARGET)]
