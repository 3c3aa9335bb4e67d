"""On whose behalf a request is: what its key lets it do, and what it has used of that."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.gateway.keys.quota import Allowance, Quota
from moonpool.gateway.problem import ApiError, invalid, over_quota, revoked_key

SALT_CHARS = 32


class Rights(Struct, frozen=True):
    id: str = ""
    """Of the key; empty where none is asked for."""
    group: str = ""
    """Whose KVCache and cached contexts it uses: its own id where it was put into no group."""
    may_look: bool = False
    """At the cluster."""
    may_change: bool = False
    classes: tuple[str, ...] | None = ()
    """Priority classes that a request may name, the first for those that name none. None: any."""
    slo: Slo = Slo()
    """Of requests that have no limits of their own."""
    allowed: Allowance = Allowance()
    salt: bytes | None = None
    """Of all of its KVCache, and of its group's. None: a request's own salt is all there is."""


ANYONE = Rights(may_look=True, classes=None)
"""Where no keys are asked for."""


@dataclass(slots=True)
class Totals:
    """Since this gateway's start, or since the key has come."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    over_quota: int = 0


class Tenant:
    """`count` hears of each refusal for a quota, by its name."""

    def __init__(self, rights: Rights, classes: Classes, count: Callable[[str], None]) -> None:
        self.rights = rights
        self.totals = Totals()
        self.quota = Quota(rights.allowed, time.monotonic())
        self._classes = classes
        self._count = count
        self._uses: set[Use] = set()
        self._is_revoked = False

    # ---- what it may

    def cache_salt(self, asked: str) -> str:
        """What the request's block keys depend on: no salt that another tenant can ask for makes the same ones."""
        own = self.rights.salt
        if own is None:
            return asked
        return hmac.digest(own, asked.encode(), hashlib.sha256).hex()[:SALT_CHARS]

    def priority(self, asked: str) -> str:
        """The class that a request with `asked` (a class, an integer, or nothing) is in. Raises ApiError."""
        named = self.rights.classes
        if named is None:
            return asked
        own = self._classes.of(named[0] if named else "")
        if not asked:
            return own.name
        wanted = self._classes.of(asked)
        if wanted.name in (own.name, *named) or wanted.rank > own.rank:  # lowering is always allowed
            return wanted.name
        may = ", ".join(named or (own.name,))
        message = f"this key may not use the priority class {wanted.name!r}: it may use {may}, and later ones"
        raise ApiError(403, message, param="priority", code="class_not_allowed")

    def slo(self, own: Slo) -> Slo:
        """`own`: of the request, which goes before the key's, as that goes before its class's."""
        key = self.rights.slo
        return Slo(key.ttft if own.ttft is None else own.ttft, key.tbt if own.tbt is None else own.tbt)

    # ---- what it uses

    def begin_request(self) -> None:
        """One more request, whatever becomes of it. Raises ApiError."""
        now = time.monotonic()
        self.check(now, requests=1)
        self.quota.take(now, requests=1)
        self.totals.requests += 1

    @contextlib.contextmanager
    def stream(self, on_revoked: Callable[[str], None]) -> Iterator[Use]:
        """One stream, and as many more as `Use.admit` asks for, until the block ends. Raises ApiError.

        `on_revoked` is called with the key's id.
        """
        if self._is_revoked:  # while the request's body came
            raise revoked_key(self.rights.id)
        now = time.monotonic()
        self.check(now, streams=1)
        self.quota.take(now, streams=1)
        use = Use(self, on_revoked)
        self._uses.add(use)
        try:
            yield use
        finally:
            self._uses.discard(use)
            self.quota.close(use.streams, time.monotonic() - now)

    def check(self, now: float, *, requests: int = 0, streams: int = 0, tokens: int = 0) -> None:
        """Raises ApiError (429) for what is over a quota."""
        over = self.quota.over(now, requests=requests, streams=streams, tokens=tokens)
        if over is not None:
            self.totals.over_quota += 1
            self._count(over.quota)
            message = f"the API key {self.rights.id} is over its quota {over.quota} of {over.limit}: try again later"
            raise over_quota(over.quota, message, over.wait)

    # ---- when the keys file changes

    def change(self, rights: Rights) -> None:
        """Requests that are under way keep the salt and the class that they have."""
        self.rights = rights
        self.quota.change(rights.allowed, time.monotonic())

    def revoke(self) -> None:
        """End what is under way; nothing more begins."""
        self._is_revoked = True
        for use in list(self._uses):
            use.on_revoked(self.rights.id)

    def check_integrity(self) -> None:
        self.quota.check_integrity()
        open_ = sum(use.streams for use in self._uses)
        assert self.quota.streams == open_, f"{self.quota.streams} streams are counted, {open_} are open"


class Use:
    """What one request uses of its tenant's quotas."""

    def __init__(self, tenant: Tenant, on_revoked: Callable[[str], None]) -> None:
        self.streams = 1
        self.on_revoked = on_revoked
        self._tenant = tenant

    def admit(self, prompts: Sequence[int]) -> None:
        """`prompts`: their tokens. Takes those, and a stream for each. Raises ApiError."""
        tenant, more, now = self._tenant, len(prompts) - self.streams, time.monotonic()
        most = tenant.quota.allowed.streams
        if most is not None and len(prompts) > most:
            message = f"{len(prompts)} prompts are more than the {most} streams that this key may have at one time"
            raise invalid("prompt", message + ": send fewer in one request")
        tokens = sum(prompts)
        tenant.check(now, streams=more, tokens=tokens)
        tenant.quota.take(now, streams=more, tokens=tokens)
        tenant.totals.prompt_tokens += tokens
        self.streams += more

    def settle(self, output: int, unserved: int) -> None:
        """Tokens that came, and tokens of prompts for which the cluster had no room: those are not counted."""
        self._tenant.quota.take(time.monotonic(), tokens=output - unserved)
        self._tenant.totals.output_tokens += output
        self._tenant.totals.prompt_tokens -= unserved
