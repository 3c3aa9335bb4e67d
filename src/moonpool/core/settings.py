"""The Conductor's configuration, and what it counts of its decisions."""

from __future__ import annotations

from msgspec import Struct, field

from moonpool.core.admission import ADMISSION_POLICIES, DEAR_FIRST, AdmissionPolicy, DearFirst
from moonpool.core.classes import check_classes
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients, TransferCost
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import PriorityClass, Slo


class ConductorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Raises ValueError for a value that cannot work."""

    placement: PlacementPolicy = "kvcache-centric"
    admission: AdmissionPolicy = "forecast"
    threshold: float = 1.0
    """algorithm-1: fetch where the pool's longest run is at least this many times an instance's own; 1 or more.

    The paper gives no value. 1 fetches whatever is longer, so that the next turn of a conversation reuses the whole
    answer that another node's decode instance has left; where links are slow a higher one recomputes small rests.
    """
    slo: Slo = Slo()
    """Where neither a request nor its class has one."""
    classes: tuple[PriorityClass, ...] = ()
    """None: one for all."""
    queue_bound: int = 256
    """Most requests that are held, reserving or in prefill; a newcomer beyond gets 429."""
    heartbeat_limit: float = 5.0
    """Seconds of silence after which a part is lost."""
    room_timeout: float = 2.0
    """Seconds that a node has to answer `ReserveRoom`."""
    max_failed_attempts: int = 8
    """Preemptions do not count."""
    output_share: float = 0.0
    """Part of the output still to come, 0 to 1, for which a decode instance must have pages at placement.

    One page to grow into is always booked; 1 never preempts, 0 packs the batch tightest.
    """
    batch_ahead: float = 0.5
    """How many requests beyond its slots a decode instance is given, as a share of them.

    They are prefilled while they wait for a slot, so that a slot that comes free is taken at once.
    """
    count_coming_blocks: bool = True
    """Whether blocks that a prefill instance is still computing count as held by those that come behind (PAPER §9).

    They wait for them there (`Place.awaits`). Not counted, every prompt of a burst computes the prefix they share.
    """
    dear_first: DearFirst = "auto"
    """Whether `forecast` refuses first, in overload, what takes most computing for its worth (`worth.py`).

    `auto`: with the placement `kvcache-centric`, which looks at what a prompt costs after all that is cached of it.
    """
    hold_patience: float = 1.0
    """Seconds after which a held request is not overtaken any more by later ones of its model."""
    prefill_cost: PrefillCoefficients = PrefillCoefficients()
    decode_cost: DecodeCoefficients = DecodeCoefficients()
    transfer_cost: TransferCost = TransferCost()

    @property
    def refuses_dear_first(self) -> bool:
        return self.dear_first == "always" or (self.dear_first == "auto" and self.placement == "kvcache-centric")

    def __post_init__(self) -> None:
        _one_of("placement", self.placement, PLACEMENT_POLICIES)
        _one_of("admission", self.admission, ADMISSION_POLICIES)
        _one_of("dear-first", self.dear_first, DEAR_FIRST)
        check_classes(self.classes)
        _at_least("threshold", self.threshold, 1.0)
        _at_least("queue-bound", self.queue_bound, 1)
        _at_least("max-failed-attempts", self.max_failed_attempts, 1)
        for name, seconds in (
            ("heartbeat-limit", self.heartbeat_limit),
            ("room-timeout", self.room_timeout),
            ("slo ttft", self.slo.ttft),
            ("slo tbt", self.slo.tbt),
        ):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"{name} is {seconds:g} s; give a finite time above 0")
        _at_least("batch-ahead", self.batch_ahead, 0.0)
        if not 0 <= self.output_share <= 1:
            raise ValueError(f"output-share is {self.output_share:g}; give a number from 0 to 1")


class ClassDecisions(Struct):
    """Of one priority class."""

    arrived: int = 0
    placed: int = 0
    """Further attempts included."""
    finished: int = 0
    rejected: int = 0
    displaced: int = 0
    """Made way for others: of `rejected`, and batch work that was placed again."""


class Decisions(Struct):
    """Counted since this Conductor began."""

    arrived: int = 0
    placed: int = 0
    adopted: int = 0
    """Placed by an earlier Conductor, and going on."""
    held: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason."""
    late_refusals: int = 0
    """Of `rejected`, by the decode instance: after their prefill."""
    late_refused_tokens: int = 0
    """That were prefilled for them, and for nothing."""
    resubmitted: dict[str, int] = field(default_factory=dict)
    """By cause: `prefill-failed`, `decode-refused`, `preempted`, `displaced` (batch work), `lost`."""
    classes: dict[str, ClassDecisions] = field(default_factory=dict)
    room_refused: int = 0
    room_timeouts: int = 0
    fetches: int = 0
    fetched_blocks: int = 0
    hit_blocks: int = 0
    """Of placed prompts, fetched ones included, as predicted."""
    prompt_blocks: int = 0
    """Whole blocks of placed prompts."""
    hot_blocks_copied: int = 0
    surplus_dropped: int = 0
    cold_demoted: int = 0
    """By the sweep: blocks, for each node that was told so."""
    copies_ordered: int = 0
    drops_ordered: int = 0
    """Blocks, for each node that was told so."""
    parts_lost: int = 0
    snapshots_asked: int = 0


def of_class(decisions: Decisions, name: str) -> ClassDecisions:
    if name not in decisions.classes:
        decisions.classes[name] = ClassDecisions()
    return decisions.classes[name]


def count(table: dict[str, int], name: str) -> None:
    table[name] = table.get(name, 0) + 1


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value:g}; the least is {least:g}")
