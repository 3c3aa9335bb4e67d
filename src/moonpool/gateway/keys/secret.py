"""A key as clients send it, `mp-ID-SECRET`, and what is kept of it: a scrypt hash in the PHC string format.

The id is no secret: it names the key in files, logs and answers, and says which one hash is to be looked at. So that
nobody who knows an id can have hash after hash computed, a hash comes with a tag of the key, which tells at once that
almost any other key is wrong.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

ID = r"[0-9a-f]{10}"
HASH = r"\$scrypt\$ln=1[4-6],r=8,p=1(?:,tag=[0-9a-f]{8})?\$[A-Za-z0-9+/]{22}\$[A-Za-z0-9+/]{43}"
"""16 bytes of salt, 32 of digest; `ln` is bounded, so that no file can ask for gigabytes."""
COST = 14
"""`ln`, the logarithm of scrypt's N: 16 MiB and some 40 ms for one hash."""
_BLOCK, _PARALLEL = 8, 1
_MOST_BYTES = 256 << 20
"""Twice what the largest `ln` takes: OpenSSL counts a little more than the table."""
_KEY = re.compile(rf"mp-({ID})-[0-9a-f]{{48}}")


def draw_id() -> str:
    return secrets.token_hex(5)


def draw_key(id_: str) -> str:
    """192 random bits: nobody guesses them, however fast hashes get."""
    return f"mp-{id_}-{secrets.token_hex(24)}"


def id_of(key: str) -> str | None:
    """None: it has not the form of a key."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def hash_of(key: str) -> str:
    salt = secrets.token_bytes(16)
    parameters = f"ln={COST},r={_BLOCK},p={_PARALLEL},tag={_tag(key)}"
    return f"$scrypt${parameters}${_text(salt)}${_text(_scrypt(key, salt, COST))}"


def may_be_hash_of(hashed: str, key: str) -> bool:
    """Whether it is worth computing: False for all but one of four thousand million wrong keys. Takes microseconds."""
    _, _, tag = hashed.split("$")[2].partition(",tag=")
    return not tag or hmac.compare_digest(tag, _tag(key))


def is_hash_of(hashed: str, key: str) -> bool:
    """Whether `hashed`, which has the form `HASH`, is of this key. Takes long; without the interpreter lock."""
    _, _, parameters, salt, digest = hashed.split("$")
    cost = int(parameters.partition(",")[0].removeprefix("ln="))
    return hmac.compare_digest(_scrypt(key, _bytes(salt), cost), _bytes(digest))


def _tag(key: str) -> str:
    """32 of its bits: who reads them in the file has 160 more to guess."""
    return hashlib.sha256(b"moonpool key " + key.encode()).hexdigest()[:8]


def _scrypt(key: str, salt: bytes, cost: int) -> bytes:
    return hashlib.scrypt(key.encode(), salt=salt, n=1 << cost, r=_BLOCK, p=_PARALLEL, maxmem=_MOST_BYTES, dklen=32)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4))
