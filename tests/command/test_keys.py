"""`moonpool keys`: what is printed, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from moonpool.command.keys import Wanted, add, list_, revoke
from moonpool.errors import ConfigError
from moonpool.gateway.keys.file import read
from moonpool.gateway.keys.secret import draw_id, draw_key, id_of, is_hash_of
from tests.replay.kit import moonpool_command

PLAIN = Wanted(
    name="acme",
    admin=False,
    group=None,
    classes=None,
    slo_ttft=None,
    slo_tbt=None,
    requests_per_minute=None,
    tokens_per_minute=None,
    streams=None,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_printed_once_listed_and_revoked(path: Path) -> None:
    made = moonpool_command("keys", "add", "acme", "--keys", str(path))
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    id_ = id_of(key)
    assert id_ is not None, "the key alone is on stdout"
    assert (id_ in made.stderr, key in made.stderr) == (True, False)
    (entry,) = read(path).keys
    assert (entry.name, entry.admin, is_hash_of(entry.hash, key)) == ("acme", False, True)
    flags = ("--admin", "--group", "us", "--class", "high, batch", "--slo-ttft", "2s", "--slo-tbt", "100ms")
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "100000", "--streams", "8")
    other = moonpool_command("keys", "add", "ops", "--keys", str(path), *flags, *limits)
    assert other.returncode == 0, other.stderr
    text = moonpool_command("keys", "list", "--keys", str(path)).stdout
    row = next(line for line in text.splitlines() if " ops " in line).split()
    assert row[:2] == [id_of(other.stdout.strip()), "ops"]
    assert row[3:] == ["us", "yes", "high,batch", "2s", "0.1s", "60", "100,000", "8"]
    listed = json.loads(moonpool_command("keys", "list", "--keys", str(path), "--json").stdout)
    assert [each["name"] for each in listed] == ["acme", "ops"]
    assert (listed[0]["group"], listed[0]["streams"], listed[1]["slo-tbt"]) == (id_, None, 0.1)
    for secret in (key.rpartition("-")[2], "scrypt", read(path).secret):
        assert secret not in text + json.dumps(listed)
    gone = moonpool_command("keys", "revoke", id_, "--keys", str(path))
    assert gone.returncode == 0, gone.stderr
    assert [each.name for each in read(path).keys] == ["ops"]
    again = moonpool_command("keys", "revoke", id_, "--keys", str(path))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "moonpool keys list" in again.stderr


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"name": ""}, "NAME ''"),
        ({"name": "a b"}, "NAME 'a b': must have 1 to 64 letters"),
        ({"name": "x" * 65}, "NAME"),
        ({"name": "a\n"}, "NAME"),
        ({"group": "-"}, "--group '-'"),
        ({"classes": "high,lo w"}, "--class 'lo w'"),
        ({"slo_ttft": "soon"}, "--slo-ttft 'soon': must be a duration like 30s"),
        ({"slo_tbt": "0s"}, "--slo-tbt '0s'"),
    ],
)
def test_a_mistake_names_the_flag_and_makes_no_file(path: Path, changed: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        add(path, replace(PLAIN, **changed))
    assert not path.exists()


def test_numbers_out_of_range_are_named(path: Path) -> None:
    for flag in ("--requests-per-minute", "--tokens-per-minute", "--streams"):
        refused = moonpool_command("keys", "add", "a", "--keys", str(path), flag, "0")
        assert (refused.returncode, flag in refused.stderr) == (2, True), refused.stderr


def test_a_whole_key_is_not_taken_for_its_id_and_not_repeated(path: Path) -> None:
    key = draw_key(draw_id())
    with pytest.raises(ConfigError, match="by its id alone") as told:
        revoke(path, key)
    assert key.rpartition("-")[2] not in str(told.value)
    with pytest.raises(ConfigError, match="is not there"):
        revoke(path, draw_id())


def test_a_file_without_keys_is_said_to_have_none(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(path, PLAIN)
    revoke(path, read(path).keys[0].id)
    capsys.readouterr()
    list_(path, as_json=False)
    assert capsys.readouterr().out == f"{path} has no keys\n"
    with pytest.raises(ConfigError, match="is not there"):
        list_(path.parent / "other.json", as_json=True)
