"""Hidden states in slots of the taker's memory: by a shared mapping and over tcp."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.core.vocabulary import BlockKey, KeySpaceId, PartId
from moonpool.errors import TransferError
from moonpool.messenger.intake import SLOTS, Door, Intake, Outlet
from moonpool.messenger.server import TcpServer
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import Bytes

HERE, ELSEWHERE = PartId("node-0"), PartId("node-1")
SECONDS = 20.0


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def address(door: Door) -> Iterator[str]:
    server = TcpServer("127.0.0.1", 0, None, door)
    yield server.address
    server.close()


@pytest.fixture
def messenger() -> Iterator[TcpMessenger]:
    messenger = TcpMessenger(None)
    yield messenger
    messenger.close()


@pytest.fixture
def intake(door: Door) -> Iterator[Intake]:
    door.intake = intake = Intake("group", 10_000)
    yield intake
    intake.close()


def states(seed: int, nbytes: int = 9000) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("where", [HERE, ELSEWHERE])
def test_what_is_put_lies_in_its_slot(where: PartId, intake: Intake, address: str, messenger: TcpMessenger) -> None:
    outlet = Outlet("group", intake.address(HERE, address), where, messenger)
    assert outlet.is_shared == (where == HERE)
    for first in range(0, 3 * SLOTS, SLOTS):
        for serial in range(first, first + SLOTS):
            outlet.put(serial, states(serial, 9000 - serial), SECONDS)
        for serial in range(first, first + SLOTS):
            assert np.array_equal(intake.view(serial, 9000 - serial), states(serial, 9000 - serial))
    assert messenger.counters()["bytes_sent"] == (0 if where == HERE else sum(9000 - n for n in range(3 * SLOTS)))


@pytest.mark.parametrize("where", [HERE, ELSEWHERE])
def test_more_than_a_slot_holds_is_refused(
    where: PartId, intake: Intake, address: str, messenger: TcpMessenger
) -> None:
    outlet = Outlet("group", intake.address(HERE, address), where, messenger)
    with pytest.raises(TransferError, match="bytes of hidden states"):
        outlet.put(0, states(0, intake.slot_bytes + 1), SECONDS)
    outlet.put(0, states(1), SECONDS)
    assert np.array_equal(intake.view(0, 9000), states(1))


def test_another_life_of_a_group_writes_nothing(
    door: Door, intake: Intake, address: str, messenger: TcpMessenger
) -> None:
    outlet = Outlet("group", intake.address(HERE, address), ELSEWHERE, messenger)
    outlet.put(0, states(1), SECONDS)
    door.intake = later = Intake("another", 10_000)
    with pytest.raises(TransferError, match="group is not the group"):
        outlet.put(0, states(2), SECONDS)
    assert not later.view(0, 9000).any()
    later.close()


def test_a_mapping_that_cannot_be_had_is_said(intake: Intake, messenger: TcpMessenger) -> None:
    gone = intake.address(HERE, "127.0.0.1:1")
    other = type(gone)(HERE, "/proc/self/fd/99999", gone.data_address, gone.slot_bytes)
    with pytest.raises(TransferError, match="cannot be mapped"):
        Outlet("group", other, HERE, messenger)


def test_nothing_else_is_let_in(intake: Intake, address: str, messenger: TcpMessenger) -> None:
    with pytest.raises(TransferError):
        messenger.read(address, KeySpaceId("aa"), [BlockKey(b"k" * 16)], [states(0)], 1.0).result()
