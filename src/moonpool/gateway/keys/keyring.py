"""The keys of a gateway: who sends which, and what becomes of them when their file changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.gateway.keys.checks import BusyError, Checks
from moonpool.gateway.keys.file import ApiKey, KeyFile, Stamp, read, stamp_of
from moonpool.gateway.keys.secret import id_of, may_be_hash_of
from moonpool.gateway.keys.tenant import Rights, Tenant
from moonpool.gateway.meters import Meters
from moonpool.gateway.problem import ApiError, again_after, revoked_key, wrong_key
from moonpool.gateway.shown import KeyUsage

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Between two looks at the file: a key is revoked within a second."""
MOST_NAMED = 8


@dataclass(slots=True)
class _Known:
    key: ApiKey
    tenant: Tenant
    digest: bytes | None = None
    """Of the secret, once it has been proven right; another one is wrong then."""


class Keyring:
    def __init__(self, path: Path, file: KeyFile, classes: Classes, meters: Meters) -> None:
        """`file`: what `path` holds, as was read before."""
        self._path = path
        self._stamp: Stamp | None = ()
        """That no file has: at the first look, too, one that is gone by then is news."""
        self._classes = classes
        self._meters = meters
        self._checks = Checks()
        self._known: dict[str, _Known] = {}
        self._groups: set[str] = set()
        self._secret = ""
        self.fault = ""
        """Why the file cannot be read; meanwhile the keys of before stay."""
        self._apply(file)

    @property
    def count(self) -> int:
        return len(self._known)

    def has_group(self, group: str) -> bool:
        """Whether there is a key in it."""
        return group in self._groups

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            stamp = await asyncio.to_thread(stamp_of, self._path)
            if stamp == self._stamp and not self.fault:
                continue
            self._stamp = stamp  # taken before it is read: what is written meanwhile is seen the next time
            try:
                file = await asyncio.to_thread(read, self._path)
            except ConfigError as e:
                if str(e) != self.fault:
                    log.error("%s; until that is mended the keys of before stay", e)
                self.fault = str(e)
            else:
                self.fault = ""
                self._apply(file)

    async def tenant_of(self, given: Sequence[str]) -> Tenant:
        """`given`: the request's `Authorization` headers. Raises ApiError (401, 503)."""
        key = _bearer(given)
        if key is None:
            self._meters.unauthenticated("missing")
            raise wrong_key("this server needs an API key, as one `Authorization: Bearer mp-…`")
        id_ = id_of(key)
        if id_ is None:
            self._meters.unauthenticated("malformed")
            raise wrong_key("this is no API key of this server: they look like mp-ID-SECRET")
        known = self._known.get(id_)
        if known is None or not await self._is_right(known, key) or self._known.get(id_) is not known:
            self._meters.unauthenticated("wrong")
            raise revoked_key(id_)
        return known.tenant

    def usage(self) -> list[KeyUsage]:
        """What each key has used, for /cluster/keys."""
        return [
            KeyUsage(
                id=id_,
                name=known.key.name,
                group=known.key.group or id_,
                requests=known.tenant.totals.requests,
                prompt_tokens=known.tenant.totals.prompt_tokens,
                output_tokens=known.tenant.totals.output_tokens,
                over_quota=known.tenant.totals.over_quota,
                streams=known.tenant.quota.streams,
            )
            for id_, known in self._known.items()
        ]

    def close(self) -> None:
        self._checks.close()

    def check_integrity(self) -> None:
        self._checks.check_integrity()
        for known in self._known.values():
            known.tenant.check_integrity()

    async def _is_right(self, known: _Known, key: str) -> bool:
        digest = self._checks.digest(key)
        if known.digest is not None:
            return hmac.compare_digest(known.digest, digest)
        if not may_be_hash_of(known.key.hash, key):
            return False
        try:
            is_right = await self._checks.is_right(known.key.hash, key, digest)
        except BusyError as e:
            self._meters.unauthenticated("busy")
            message = "too many API keys are being checked: try again later"
            raise ApiError(503, message, code="keys_busy", headers=again_after(e.wait)) from None
        if is_right:
            known.digest = digest
        return is_right

    def _apply(self, file: KeyFile) -> None:
        before, self._known = self._known, {}
        is_other, self._secret = file.secret != self._secret, file.secret
        lacking = []
        for key in file.keys:
            known = before.get(key.id)
            if known is not None and known.key == key and not is_other:
                self._known[key.id] = before.pop(key.id)
                continue
            rights = self._rights(key)
            if len(rights.classes or ()) < len(key.classes):
                lacking.append(key.id)
            if known is None or known.key.hash != key.hash:
                self._known[key.id] = _Known(key, Tenant(rights, self._classes, self._meters.over_quota))
                continue
            known.tenant.change(rights)
            known.key = key
            self._known[key.id] = before.pop(key.id)
        for known in before.values():
            known.tenant.revoke()
        self._groups = {known.tenant.rights.group for known in self._known.values()}
        if lacking:
            log.warning("priority classes that are not configured are named by API keys %s", _some(lacking))
        if before:
            log.info("%s has %d API keys; revoked: %s", self._path, self.count, _some([*before]))

    def _rights(self, key: ApiKey) -> Rights:
        configured = {c.name for c in self._classes.all}
        classes = tuple(name for name in key.classes if name in configured)
        group = key.group or key.id
        return Rights(
            id=key.id,
            group=group,
            may_look=key.admin,
            may_change=key.admin,
            classes=classes,
            slo=Slo(key.slo_ttft, key.slo_tbt),
            allowed=key.allowed,
            salt=hmac.digest(bytes.fromhex(self._secret), f"cache {group}".encode(), hashlib.sha256),
        )


def _some(ids: Sequence[str]) -> str:
    more = len(ids) - MOST_NAMED
    return ", ".join(ids[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _bearer(given: Sequence[str]) -> str | None:
    """None where there is no key, or more than one."""
    if len(given) != 1:
        return None
    scheme, _, key = given[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None
