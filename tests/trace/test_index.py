"""A trace read over and over: in order of arrival, and without being kept where it is long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moonpool.errors import TraceError
from moonpool.trace import index
from moonpool.trace.index import Index, few
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest


@pytest.fixture(params=["kept", "read again"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    how: str = request.param
    if how == "read again":
        monkeypatch.setattr(index, "MOST_KEPT", 0)
    return how


def written(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text, newline="")
    return file


def mooncake(arrivals: list[int]) -> str:
    return "".join(
        f'{{"timestamp": {at}, "input_length": {1 + number}, "output_length": 3, "hash_ids": [{number}]}}\n'
        for number, at in enumerate(arrivals)
    )


@pytest.mark.parametrize("seed", range(3))
def test_requests_come_in_order_of_arrival_and_ties_in_that_of_the_file(tmp_path: Path, either: str, seed: int) -> None:
    arrivals = [random.Random(seed).randrange(50) * 1000 for _ in range(200)]
    trace = TraceFile(written(tmp_path, mooncake(arrivals)))
    found = Index(trace)
    expected = sorted(trace, key=lambda request: request.arrival)
    assert list(found) == expected
    assert list(found) == expected, "as often as it is asked"
    assert [request.arrival for request in found.times()] == [request.arrival for request in expected]


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
DATED = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5,7,8\n2024-05-10 00:00:01.5,9,9\n"


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("\ufeff" + mooncake([2000, 1000]), [2, 1]),
        ("\n\r\n" + mooncake([1000]) + "\n\nbad\n" + mooncake([500]), [1, 1]),
        (mooncake([1000]).strip(), [1]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\r\n5.5,11,4\r\noops\r\n1.5,12,4", [12, 11]),
        ("\ufeff" + BURST + "9,m,400,5,405,x\n8,m,9,0,9,x\n7,m,300,5,305,x\n", [300, 400]),
        (DATED, [7, 9]),
    ],
)
def test_every_form_of_file(tmp_path: Path, either: str, text: str, inputs: list[int]) -> None:
    trace = TraceFile(written(tmp_path, text), skip_bad=True)
    found = Index(trace)
    assert [request.input_tokens for request in found] == inputs
    assert list(found) == sorted(trace, key=lambda request: request.arrival)


def test_a_long_trace_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_KEPT", 50)
    assert few([TraceRequest(0.0, 9, 9, (1,))] * 10) is not None
    drawn = iter([TraceRequest(0.0, 9, 9, (1,))] * 1000)
    assert few(drawn) is None
    assert len(list(drawn)) > 900, "no more is drawn than is needed to know"
    file = written(tmp_path, mooncake([0, 1000, 2000] * 20))
    found = Index(TraceFile(file))
    file.write_text(mooncake([0, 7000, 2000] * 20))
    assert 7.0 in [request.arrival for request in found], "it is the file that is read"


def test_a_file_that_changes_meanwhile_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_KEPT", 0)
    file = written(tmp_path, mooncake([0, 1000]))
    found = Index(TraceFile(file))
    file.write_text(mooncake([0])[:-9])
    with pytest.raises(TraceError, match="has changed since it was first read"):
        list(found)
    file.unlink()
    with pytest.raises(TraceError, match=r"cannot read .*No such file"):
        list(found)
