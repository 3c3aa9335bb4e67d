"""Chunked pipeline parallelism (PAPER §3): machines that form one prefill instance and divide the model's layers.

A step goes through them one after another, and the next one follows as soon as the first machine is free, so chunks of
one prompt are under way in several machines at once. A prompt of one chunk takes as long as on one machine, and the
hops from one to the next; one of m chunks on X machines (m + X - 1) / X of it. Only a stage's borders are crossed by
activations. The group's DRAM, links and ways to its accelerators are those of its machines together: each keeps the
KVCache of its own layers.
"""

from __future__ import annotations

import msgspec

from moonpool.sim.profile import Profile


def of_group(profile: Profile, machines: int) -> Profile:
    """The hardware of a prefill instance of so many machines as its node and the Conductor see it.

    Its seconds of prefill are those that a step occupies each machine: what a queue waits for, and what is fitted. The
    time until the last machine has the first chunk comes on top of a first token, as waiting.
    Raises ValueError for more machines than layers.
    """
    if machines == 1:
        return profile
    return msgspec.structs.replace(
        profile,
        prefill=profile.prefill.shared(_share(profile, machines)),
        dram_tokens=profile.dram_tokens * machines,
        ssd_bytes=profile.ssd_bytes * machines,
        ssd_read_bytes_per_second=profile.ssd_read_bytes_per_second * machines,
        ssd_write_bytes_per_second=profile.ssd_write_bytes_per_second * machines,
        link_bytes_per_second=profile.link_bytes_per_second * machines,
        host_bytes_per_second=profile.host_bytes_per_second * machines,
    )


def hop_seconds(profile: Profile, tokens: int) -> float:
    """Of a step's activations, from one machine to the next. `profile`: of one machine."""
    return profile.link_latency + tokens * profile.activation_bytes_per_token / profile.link_bytes_per_second


def _share(profile: Profile, machines: int) -> float:
    """Of the layers, on the machine that has most of them: no step is faster than there."""
    if not 1 <= machines <= profile.layers:
        raise ValueError(f"a pipeline of {machines} machines: {profile.name} has {profile.layers} layers to divide")
    return -(-profile.layers // machines) / profile.layers


class Stages:
    """When steps are done that follow one another through a group."""

    def __init__(self, profile: Profile, machines: int) -> None:
        """`profile`: of one machine."""
        self._profile = profile
        self._free_at = [0.0] * machines

    def take(self, seconds: float, tokens: int, now: float) -> tuple[float, float]:
        """A step begins that occupies each machine for so long: when the first one is free again, when it is done."""
        free, hop = self._free_at, hop_seconds(self._profile, tokens)
        at = now
        for stage, other in enumerate(free):
            came = at + hop if stage else now
            at = free[stage] = max(came, other) + seconds
        return free[0], at
