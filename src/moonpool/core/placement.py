"""Which prefill and which decode instance: functions `(view, wanted) -> Choice`, one `match` chooses."""

from __future__ import annotations

from typing import get_args

import numpy as np

from moonpool.core.choice import (
    Choice,
    DecodeOption,
    FetchPlan,
    PrefillOption,
    View,
    Wanted,
)
from moonpool.core.kvcentric import place_kvcache_centric
from moonpool.core.policies import (
    place_algorithm_1,
    place_cache_aware,
    place_dynamo,
    place_lmetric,
    place_load_balance,
    place_prefix_affine,
    place_random,
    place_round_robin,
)
from moonpool.core.vocabulary import PlacementPolicy

__all__ = [
    "PLACEMENT_POLICIES",
    "Choice",
    "DecodeOption",
    "FetchPlan",
    "PlacementPolicy",
    "PrefillOption",
    "View",
    "Wanted",
    "place",
]

PLACEMENT_POLICIES: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)


def place(policy: PlacementPolicy, view: View, wanted: Wanted, rng: np.random.Generator, threshold: float) -> Choice:
    """`threshold` is algorithm-1's, `rng` is drawn from by `random` only."""
    match policy:
        case "kvcache-centric":
            return place_kvcache_centric(view, wanted)
        case "algorithm-1":
            return place_algorithm_1(view, wanted, threshold)
        case "cache-aware":
            return place_cache_aware(view, wanted)
        case "prefix-affine":
            return place_prefix_affine(view, wanted)
        case "round-robin":
            return place_round_robin(view, wanted)
        case "load-balance":
            return place_load_balance(view, wanted)
        case "random":
            return place_random(view, wanted, rng)
        case "lmetric":
            return place_lmetric(view, wanted)
        case "dynamo":
            return place_dynamo(view, wanted)
