"""A Conductor that was kept and made again goes on as the first one would, with every attribute that it has."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.directory import Directory
from moonpool.core.fleet import Fleet, NodeLoad
from moonpool.core.keydump import KeyDump, KeyGroup
from moonpool.core.pages import pages_for
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.snapshot import Snapshot, freeze, thaw
from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, PartId, PartKind, Slo, Tier
from tests.core.conductor_scene import Odds, Scene, arrival, gateway, node, worker

SPACE = KeySpaceId("s")
NODES = [PartId(f"node-{i}") for i in range(4)]


def groups(dump: KeyDump, most: int = 50) -> Iterator[KeyGroup]:
    while not dump.is_done:
        for copy in dump.take(most):
            yield from copy.groups()


def over_the_wire(snapshot: Snapshot) -> Snapshot:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)


def copy_of(conductor: Conductor) -> Conductor:
    snapshot, dump = conductor.snapshot()
    sent = msgspec.msgpack.encode(list(groups(dump)))
    conductor.end_dump()
    return Conductor.restored(over_the_wire(snapshot), msgspec.msgpack.decode(sent, type=list[KeyGroup]))


def busy_scene(config: ConductorConfig, requests: int = 60) -> Scene:
    scene = Scene(3, config, Odds(0.15, 0.03, 0.05, 0.05, 0.2, 0.1, 0.1))
    scene.start(gateway())
    for i in range(3):
        scene.start(node(i))
        for kind in (PartKind.PREFILL, PartKind.DECODE):
            scene.start(worker(kind, i, on=i, pages=24, slots=4))
    for i in range(requests):
        scene.request(arrival(f"r{i}", 20 + 7 * i % 200, 1 + i % 40, family=f"f{i % 7}"))
        scene.run(0.15)
        if i == 20:
            scene.kill(PartId("node-1"))
        if i == 25:
            scene.start(node(1, life=2))
            scene.start(worker(PartKind.DECODE, 1, on=1, life=2, pages=24, slots=4))
    return scene


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_a_copy_decides_as_the_original_does(policy: str) -> None:
    config = ConductorConfig(placement=policy, slo=Slo(ttft=20.0, tbt=2.0))  # type: ignore[arg-type]
    scene = busy_scene(config)
    copy = copy_of(scene.conductor)
    copy.check_integrity()
    assert msgspec.json.encode(copy.describe(scene.now)) == msgspec.json.encode(scene.conductor.describe(scene.now))
    known = len(scene.journal)
    for i in range(60, 90):
        scene.request(arrival(f"r{i}", 20 + 7 * i % 200, 1 + i % 40, family=f"f{i % 7}"))
        scene.run(0.15)
    scene.run(10.0)
    later = scene.journal[known:]
    assert len(later) > 300
    for now, event, actions in later:
        assert copy.handle(event, now) == actions
    copy.check_integrity()


def test_a_copy_of_a_copy_is_the_same() -> None:
    """Nothing is lost or added on the way: whatever attribute an object of the core has is there again."""
    conductor = busy_scene(ConductorConfig()).conductor
    first, _ = conductor.snapshot()
    names = {name for name, _ in first.shapes}
    assert names >= {f"moonpool.core.{n}" for n in ("fleet:Fleet", "requests:Request", "gate:Gate", "cost:Fit")}
    second, _ = copy_of(conductor).snapshot()
    assert msgspec.msgpack.encode(second) == msgspec.msgpack.encode(first)


def test_one_object_is_one_object_again() -> None:
    copy = copy_of(busy_scene(ConductorConfig()).conductor)
    fleet: Fleet = copy._fleet
    assert copy._attempts._fleet is copy._attempts.endings._fleet is fleet
    assert copy._attempts._out is copy._out
    for load in fleet.prefill.values():
        assert load.part is fleet.parts[load.part.id]
        assert load.cost is copy._prefill_costs[load.part.id]


def test_what_is_no_plain_data_is_refused_and_its_owner_named() -> None:
    conductor = Conductor(ConductorConfig(), 0)
    conductor._attempts._gate.later = iter(())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"moonpool.core.gate:Gate.later holds a tuple_iterator .*Portable"):
        conductor.snapshot()
    conductor._attempts._gate.later = lambda: 0  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Gate.later holds a .*lambda"):
        conductor.snapshot()


def test_all_kinds_of_data_come_back() -> None:
    shared = [1, 2]
    given = {
        "none": None,
        "numbers": (1, -5, 1 << 80, -(1 << 70), (1 << 64) - 1, 0.1, float("inf")),
        "text": ("a", b"\x00\xff", True),
        "lists": [shared, shared, []],
        ("a", 1): OrderedDict([(3, "x"), (1, "y")]),
        "deque": deque([1, 2], maxlen=2),
        "sets": [{3, 1, 2}, frozenset({b"k"})],
        "kind": PartKind.NODE,
        "function": pages_for,
        "array": array("d", [0.5, 2.0]),
        "struct": Chain(SPACE, (BlockKey(b"x" * 16),)),
    }
    fleet = Fleet()
    fleet.nodes = given  # type: ignore[assignment]
    copy: dict[object, object] = thaw(over_the_wire(freeze(fleet)), Fleet).nodes  # type: ignore[assignment]
    assert copy == given
    assert list(copy) == list(given)
    lists: list[list[int]] = copy["lists"]  # type: ignore[assignment]
    assert lists[0] is lists[1]
    deck: deque[int] = copy["deque"]  # type: ignore[assignment]
    assert deck.maxlen == 2


def test_numpy_comes_back() -> None:
    rng = np.random.Generator(np.random.PCG64(7))
    rng.random(3)
    fleet = Fleet()
    given = {"table": np.arange(6.0).reshape(2, 3), "one": np.int64(5), "rng": rng}
    fleet.nodes = given  # type: ignore[assignment]
    copy = thaw(over_the_wire(freeze(fleet)), Fleet).nodes
    np.testing.assert_array_equal(copy["table"], given["table"])  # type: ignore[index, arg-type]
    assert copy["one"] == 5  # type: ignore[index]
    assert copy["rng"].random(5).tolist() == rng.random(5).tolist()  # type: ignore[index, attr-defined]


def test_no_other_code_is_run_by_reading() -> None:
    for name in ("os:system", "subprocess:Popen", "moonpool.core.snapshot:importlib.import_module"):
        for root in ([3, name], [11, 0, []], [13, name, None]):
            with pytest.raises(ValueError, match="damaged, or of other code"):
                thaw(Snapshot(((name, ()),), root), Conductor)
    with pytest.raises(ValueError, match="holds a NodeLoad, not a Conductor"):
        thaw(Snapshot((("moonpool.core.fleet:NodeLoad", ()),), [11, 0, []]), Conductor)
    assert isinstance(thaw(Snapshot((("moonpool.core.fleet:NodeLoad", ()),), [11, 0, []]), NodeLoad), NodeLoad)


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16, "big"))


def filled(blocks: int) -> Directory:
    directory = Directory()
    for i, each in enumerate(NODES):
        directory.join(each)
        directory.replace(each, 1, [(SPACE, Tier.DRAM, [key(j) for j in range(blocks) if j % (i + 1) == 0])])
    return directory


def content(directory: Directory, blocks: int) -> list[dict[PartId, Tier]]:
    return [dict(sorted(found.items())) for found in directory.copies(SPACE, [key(j) for j in range(blocks)])]


def test_keys_are_those_of_the_beginning_however_much_changes_meanwhile() -> None:
    blocks = 3000
    directory = filled(blocks)
    directory.forget(NODES[3])
    before = content(directory, 2 * blocks)
    snapshot, dump = freeze(directory), directory.begin_dump()
    found: list[KeyGroup] = []
    for step in range(10):
        for copy in dump.take(200):
            found += copy.groups()
        some = [key(j) for j in range(step * 100, step * 100 + 400)]
        directory.stored(NODES[1], 2 + 2 * step, SPACE, Tier.SSD, some)
        directory.removed(NODES[0], 2 + step, SPACE, Tier.DRAM, some)
        directory.stored(NODES[1], 3 + 2 * step, SPACE, Tier.DRAM, [key(blocks + 7 * step)])
    directory.replace(NODES[2], 50, [])
    found += groups(dump)
    directory.end_dump()
    directory.check_integrity()
    copy_ = thaw(over_the_wire(snapshot), Directory)
    for group in found:
        copy_.load(group)
    copy_.check_integrity()
    assert content(copy_, 2 * blocks) == before
    assert content(directory, 2 * blocks) != before
    assert len({k for group in found for k in group.unpacked()}) == sum(map(bool, before))


def test_a_dump_gives_about_as_many_keys_as_asked_for() -> None:
    dump = filled(20_000).begin_dump()
    sizes = []
    while not dump.is_done:
        sizes.append(sum(len(copy.shard) for copy in dump.take(500)))
    assert sum(sizes) == 20_000
    assert max(sizes) < 600


def test_a_restored_conductor_needs_its_keys() -> None:
    """The comparison can fail: without the directory's keys other decisions are made."""
    scene = busy_scene(ConductorConfig())
    snapshot, _ = scene.conductor.snapshot()
    scene.conductor.end_dump()
    bare = Conductor.restored(over_the_wire(snapshot), ())
    with pytest.raises(AssertionError):
        bare._directory.check_integrity()
    woke = scene.conductor.handle(ev.Woke(), scene.now)
    assert isinstance(woke, tuple)
