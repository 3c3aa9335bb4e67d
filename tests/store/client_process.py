"""A client in a process of its own: the node's socket, what it holds, block keys. It says `ready`, then waits."""

from __future__ import annotations

import sys

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, RequestId
from moonpool.errors import PoolError
from moonpool.store.client import NodeClient

SPACE = KeySpace(KeySpaceId("aa" * 16), block_tokens=16, runs=4, run_bytes=4096)
SECONDS = 10.0


def main(path: str, role: str, *hex_keys: str) -> None:
    client = NodeClient.connect(path, name=role, incarnation="1")
    keys = [BlockKey(bytes.fromhex(key)) for key in hex_keys]
    held: list[object] = []
    answer = "ready"
    match role:
        case "writer":
            room = client.join_room(RequestId("r-1"), 1).result(SECONDS)
            view = room.view(0)
            assert view is not None
            view[:] = 1
            client.complete(room, [(0, 0, 1)], [1])
            held.append(room)
        case "reader":
            lease = client.lease(SPACE, keys).result(SECONDS)
            assert lease.count == len(keys)
            held.append(lease)
        case "hoarder":
            try:
                while True:
                    held.append(client.lease(SPACE, keys).result(SECONDS))
            except PoolError as e:
                answer = f"{len(held)} leases, then: {e}"
        case "cacher":
            room = client.open_room(SPACE, keys).result(SECONDS)
            held.append(room)
            answer = f"ready, {sum(room.view(index) is not None for index in range(len(keys)))} blocks"
    client.stats().result(SECONDS)
    print(answer, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
