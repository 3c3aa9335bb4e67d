"""What `make bench-goodput` compares: clusters of so many machines, live and simulated alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from moonpool.core.coupled import CoupledMode
from moonpool.core.vocabulary import Slo

Routing = Literal["round-robin", "prefix-affine"]


class Pools(Struct, frozen=True):
    """Prefill and decode apart, around the pool, with the default policies."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    @property
    def machines(self) -> int:
        return self.prefill + self.decode

    def flags(self, slo: Slo) -> list[str]:
        fleet = ["--nodes", str(self.machines), "--prefill", str(self.prefill), "--decode", str(self.decode)]
        return [*fleet, "--slo-ttft", f"{slo.ttft:g}s", "--slo-tbt", f"{slo.tbt:g}s"]


class Coupled(Struct, frozen=True):
    """Workers that prefill and decode, each with its node as a prefix cache of its own; nothing is refused."""

    workers: int
    mode: CoupledMode
    chunk: int
    """Tokens of a chunked step."""
    routing: Routing

    @property
    def name(self) -> str:
        how = self.mode if self.mode != "chunked" else f"chunks of {self.chunk}"
        return f"{self.workers} coupled, {how}, {self.routing}"

    @property
    def machines(self) -> int:
        return self.workers

    def flags(self, slo: Slo) -> list[str]:
        """`slo`: what is measured; a router before plain engines knows of none."""
        del slo
        fleet = ["--nodes", str(self.workers), "--coupled", str(self.workers), "--coupled-mode", self.mode]
        chunk = ["--prefill-chunk", str(self.chunk)] if self.mode == "chunked" else []
        return [*fleet, *chunk, "--placement", self.routing, "--admission", "none"]


class Servers(Struct, frozen=True):
    """vLLM's own, each with its prefix cache, behind the simplest front that there can be."""

    servers: int
    chunk: int
    """Tokens of a step, at most."""

    @property
    def name(self) -> str:
        return f"{self.servers} vLLM servers, chunks of {self.chunk}, round-robin"


System = Pools | Coupled


class Scale(Struct, frozen=True):
    """The hardware, and how much slower and smaller than it a live cluster on a few cores is."""

    hardware: str
    slow_down: float
    shrink_kv: float

    @property
    def flags(self) -> list[str]:
        factors = ["--slow-down", f"{self.slow_down:g}", "--shrink-kv", f"{self.shrink_kv:g}"]
        return ["--engine", "timed", "--hardware", self.hardware, *factors]

    def slower(self, slo: Slo) -> Slo:
        """Limits of the hardware, as the live cluster has them."""
        assert slo.ttft is not None
        assert slo.tbt is not None
        return Slo(slo.ttft * self.slow_down, slo.tbt * self.slow_down)


QUIET = ("--journal", "off", "--log-level", "warning", "--queue-bound", str(1 << 16))
"""Further flags of `moonpool serve`. Limits alone refuse, as in the simulator."""


def systems(machines: int, planned: Pools, tuned: Coupled) -> Sequence[System]:
    """What is measured, `planned` by `moonpool plan` and `tuned` by the simulator among them."""
    half = Pools(machines // 2, machines - machines // 2)
    return [
        *dict.fromkeys((half, planned)),
        Coupled(machines, "prefill-first", 0, "round-robin"),
        Coupled(machines, "chunked", 2048, "round-robin"),
        tuned,
    ]
