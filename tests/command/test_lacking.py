"""What is said where something is missing, or given that cannot be used."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from typing import Any, cast

import pytest

from moonpool import cli
from moonpool.command import doctor, machine
from moonpool.command.serve import serve
from moonpool.command.settings import read_config
from moonpool.config import Config
from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.wire.link import Link
from moonpool.wire.membership import Membership


def test_the_doctor_prints_a_command_that_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor._torch()])
    assert doctor.doctor("127.0.0.1", 0) == 1
    printed = capsys.readouterr().out
    assert "pip install 'moonpool[engine]'" in printed
    assert "-e '.[engine]'" in printed


def test_serving_without_the_engines_packages_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "lacking_packages", lambda: ["torch"])
    monkeypatch.setattr("moonpool.command.serve.log_to_stderr", lambda *_: None)  # this process's log is the tests'
    with pytest.raises(ConfigError, match="no torch, which serving a model takes: pip install"):
        serve(Config(), None, lambda _: pytest.fail("a model is looked for"))
    assert cli._failed(ModuleNotFoundError("No module named 'torch'", name="torch")) == 2
    assert "moonpool: no torch, which serving a model takes" in capsys.readouterr().err


def test_directories_without_a_size_are_said_to_be_unused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert machine.ssd_directories(read_config(None, {"ssd-dir": "/mnt/nvme"})) == ()
    assert "without --ssd-per-node there is no SSD tier" in caplog.text


def test_a_conductor_of_an_unknown_host_is_named() -> None:
    async def run() -> None:
        link = Link(PartId("node-0"), "127.0.0.1", 0, None)
        try:
            member = Membership(link, "tcp://nohost.invalid:9000", *[cast(Any, dict)] * 3)
            with pytest.raises(ConfigError, match=r"the host nohost\.invalid is not"):
                await member.join(timeout=0.2)
        finally:
            link.close()

    asyncio.run(run())


def test_an_address_of_another_host_is_named_with_its_option() -> None:
    with pytest.raises(ConfigError, match="choose another --bind"):
        Link(PartId("node-0"), "192.0.2.1", 0, "a-cluster-token-of-enough-length")
