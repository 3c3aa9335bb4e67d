"""What the cluster token turns into: CURVE keys for control messages, an HMAC key for data sockets.

Both key pairs are derived from the token, the server's public key included, so it is as secret as the token: a CURVE
client that does not know it cannot even open a handshake. That makes the server key the proof of membership and no
authentication service (ZAP) is needed (docs/decisions/0003).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Any

import zmq
from zmq.utils import z85

from moonpool.errors import ConfigError

MIN_TOKEN_CHARS = 16


def check_token(token: str | None, host: str) -> None:
    """Off loopback a token is required; a short one is refused anywhere."""
    if token is None:
        if not is_loopback(host):
            raise ConfigError(
                f"binding to {host} needs a cluster token: set MOONPOOL_CLUSTER_TOKEN or --cluster-token-file"
            )
    elif len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the cluster token has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def data_key(token: str | None) -> bytes:
    """The HMAC key of data sockets; without a token a constant, so that the handshake still tells a peer from noise."""
    return _derive(token or "", "data")


def secure_server(socket: zmq.Socket[Any], token: str | None) -> None:
    if token is not None:
        public, secret = _curve_pair(token, "server")
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True


def secure_client(socket: zmq.Socket[Any], token: str | None) -> None:
    if token is not None:
        socket.curve_serverkey = _curve_pair(token, "server")[0]
        socket.curve_publickey, socket.curve_secretkey = _curve_pair(token, "client")


def _derive(token: str, use: str) -> bytes:
    return hmac.digest(b"moonpool cluster", f"{use}:{token}".encode(), hashlib.sha256)


def _curve_pair(token: str, role: str) -> tuple[bytes, bytes]:
    secret = z85.encode(_derive(token, f"curve {role}"))
    return zmq.curve_public(secret), secret
