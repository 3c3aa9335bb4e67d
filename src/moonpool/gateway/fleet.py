"""The fleet as a gateway sees it, and what it remembers of it while there is none."""

from __future__ import annotations

from moonpool.core.actions import FleetChanged
from moonpool.core.vocabulary import KeySpace, NodePeer, PartKind
from moonpool.wire.membership import Membership


class FleetView:
    """Kept up to date by whoever calls `update` after each change."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.spaces: tuple[KeySpace, ...] = ()
        """Of the fleet, or, while it has none, of the fleet before."""
        self.nodes: tuple[NodePeer, ...] = ()
        """Likewise."""
        self.context_tokens = 0
        """Longest prompt + output; 0 until there was a pair of instances once."""

    @property
    def latest(self) -> FleetChanged | None:
        return self._membership.fleet

    def update(self) -> None:
        fleet = self.latest
        if fleet is not None:
            self.spaces = fleet.spaces or self.spaces
            self.nodes = fleet.nodes or self.nodes
            self.context_tokens = fleet.context_tokens or self.context_tokens

    @property
    def lacks(self) -> str | None:
        """What keeps the fleet from serving, or None."""
        fleet = self.latest
        if fleet is None or not fleet.nodes:
            return "no node is in the cluster"
        nodes = {node.id for node in fleet.nodes}
        # A worker registers before it has found its node; until then nothing can be placed there.
        kinds = {part.kind for part in fleet.parts if part.node in nodes}
        for kind, is_there in (
            (PartKind.PREFILL, any(kind.prefills for kind in kinds)),
            (PartKind.DECODE, any(kind.decodes for kind in kinds)),
        ):
            if not is_there:
                return f"no {kind.value} worker is in the cluster"
        return None if fleet.context_tokens else "no prefill and decode worker of the cluster go together"
