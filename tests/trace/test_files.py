"""Trace files: both formats in, both out, and mistakes that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import TraceError
from moonpool.trace import read
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceFormat, TraceRequest
from moonpool.trace.write import write_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]}\n'
)


def written(directory: Path, text: str | bytes) -> Path:
    file = directory / "trace"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    trace = TraceFile(written(tmp_path, MOONCAKE))
    expected = [TraceRequest(0.0, 700, 5, (0, 1)), TraceRequest(2.5, 1024, 0, (0, 2))]
    assert list(trace) == expected
    assert list(trace) == expected, "each iteration reads anew"
    assert (trace.format, trace.requests, trace.skipped) == (TraceFormat.MOONCAKE, 2, 0)


@pytest.mark.parametrize(
    "text",
    [
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.25,396,109\n",
        "\ufeffnum_decode_tokens, arrived_at ,num_prefill_tokens,more\r\n44,0,374,x\r\n109,4.25,396,y\r\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9305900,396,109\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 02:00:04.259930+02:00,396,109\n",
    ],
)
def test_azure_rows_become_requests_without_ids(tmp_path: Path, text: str) -> None:
    trace = TraceFile(written(tmp_path, text))
    assert list(trace) == [TraceRequest(0.0, 374, 44), TraceRequest(4.25, 396, 109)]
    assert trace.format is TraceFormat.AZURE


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize(
    "text",
    [
        f"{BURST}\n5,ChatGPT,472,18,490,x\n45,GPT-4,30,0,30,x\n45.5,ChatGPT,1087,230,1317,API log\n",
        "\ufeffSession ID,Timestamp,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
        "1,5,2.0,m,472,18,490,x\r\n1,45,,m,0,0,0,x\r\n2,45.5,3.0,m,1087,230,1317,x\r\n",
    ],
)
def test_burstgpt_rows_become_requests_but_for_those_that_failed(tmp_path: Path, text: str) -> None:
    trace = TraceFile(written(tmp_path, text))
    assert list(trace) == [TraceRequest(5.0, 472, 18), TraceRequest(45.5, 1087, 230)]
    assert (trace.format, trace.requests, trace.failed, trace.skipped) == (TraceFormat.BURSTGPT, 2, 1, 0)
    assert len(list(trace)) == 2
    assert trace.failed == 1, "each iteration counts anew"


def test_a_trace_of_failures_alone_is_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        list(TraceFile(written(tmp_path, f"{BURST}\n5,ChatGPT,472,0,472,Conversation log\n")))


GOOD = '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [7]}'
AZURE = "arrived_at,num_prefill_tokens,num_decode_tokens"
DATED = "TIMESTAMP,ContextTokens,GeneratedTokens"
BAD_LINES: dict[str, tuple[str, str | bytes, str]] = {
    # first line, malformed second line, what is said of it
    "not json": (GOOD, "{oops", "malformed"),
    "half a line": (GOOD, GOOD[:40], "truncated"),
    "no length": (GOOD, '{"timestamp": 1, "output_length": 1}', "input_length"),
    "negative": (GOOD, '{"timestamp": 1, "input_length": -1, "output_length": 1}', "input_length"),
    "before the begin": (GOOD, '{"timestamp": -5, "input_length": 1, "output_length": 1}', "timestamp"),
    "text for ids": (GOOD, '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
    "an id twice": (GOOD, '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [3, 3]}', "twice"),
    "not text": (GOOD, b"{\xff\xfe}", "line 2"),
    "columns": (AZURE, "1,2", "2 columns, not 3"),
    "no number": (AZURE, "1,2,x", "'x'"),
    "negative tokens": (AZURE, "1,-2,3", "'-2' is not a number of tokens"),
    "no time": (AZURE, "nan,2,3", "'nan' is not a time"),
    "no UTF-8": (AZURE, b"1,2,\xff", "decode"),
    "no date": (DATED, "yesterday,2,3", "yesterday"),
    "columns of BurstGPT": (BURST, "5,ChatGPT,472", "3 columns, not 6"),
    "a time before the begin": (BURST, "-5,ChatGPT,472,18,490,x", "'-5' is not a time"),
    "half a token": (BURST, "5,ChatGPT,47.2,18,490,x", "47.2"),
}
NEXT = {GOOD: GOOD, AZURE: "9,9,9", DATED: "2024-01-01,9,9", BURST: "9,m,9,9,18,x"}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_malformed_line_is_named_by_its_number_and_can_be_skipped(tmp_path: Path, name: str) -> None:
    first, bad, expected = BAD_LINES[name]
    bad = bad if isinstance(bad, bytes) else bad.encode()
    file = written(tmp_path, first.encode() + b"\n" + bad)
    with pytest.raises(TraceError) as caught:
        list(TraceFile(file))
    line = str(caught.value)
    assert f"{file} line 2: " in line
    assert expected in line
    assert "--skip-bad" in line
    assert "\n" not in line

    written(tmp_path, b"\n".join((first.encode(), bad, NEXT[first].encode())))
    trace = TraceFile(file, skip_bad=True)
    assert len(list(trace)) == trace.requests == (2 if first is GOOD else 1)
    assert trace.skipped == 1
    assert trace.first_skipped.startswith("line 2: ")


def test_a_date_without_a_time_zone_among_others_that_have_one_is_malformed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 3: .* has a time zone where the first row has none"):
        list(TraceFile(written(tmp_path, f"{DATED}\n2024-01-01,9,9\n2024-01-01 00:00:01+00:00,9,9\n")))


def test_blank_lines_are_nothing_but_count(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 5: "):
        list(TraceFile(written(tmp_path, f"\n  \n{GOOD}\r\n\nbad\n")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "holds no requests"),
        ("hello\n", "line 1 is neither a JSON object"),
        ("[1, 2]\n", "line 1 is neither a JSON object"),
        ("a,b,c\n1,2,3\n", "line 1 is neither a JSON object"),
        ("{\n{\n", "holds no requests (2 malformed, the first: line 1: "),
    ],
)
def test_what_is_no_trace_is_refused_even_when_bad_lines_are_skipped(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(TraceFile(written(tmp_path, text), skip_bad=True))
    assert message in str(caught.value)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(TraceError, match="line 1 is longer than 1 MiB"):
        list(TraceFile(written(tmp_path, b"{" * (1 << 20) + b"}")))


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*absent: No such file"):
        list(TraceFile(tmp_path / "absent"))
    with pytest.raises(TraceError, match=r"cannot read .*: Is a directory"):
        list(TraceFile(tmp_path))
    with pytest.raises(TraceError, match=r"cannot write .*trace: No such file"):
        write_trace(tmp_path / "absent" / "trace", [])


def test_a_trace_that_is_read_slowly_is_not_read_ahead(tmp_path: Path) -> None:
    requests = iter(TraceFile(written(tmp_path, MOONCAKE + "bad\n")))
    next(requests)
    next(requests)
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


REQUESTS = st.builds(
    TraceRequest,
    arrival=st.integers(0, 10**10).map(lambda ms: ms / 1000),
    input_tokens=st.integers(0, 10**9),
    output_tokens=st.integers(0, 10**9),
    blocks=st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=5).map(tuple),
)


@settings(max_examples=50)
@given(st.lists(REQUESTS, min_size=1, max_size=5))
def test_what_is_written_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[TraceRequest]
) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip"
    assert write_trace(file, rows) == len(rows)
    assert list(TraceFile(file)) == rows
    write_trace(file, rows, TraceFormat.AZURE)
    assert [(r.arrival, r.input_tokens, r.output_tokens) for r in TraceFile(file)] == [
        (r.arrival, r.input_tokens, r.output_tokens) for r in rows
    ]


def test_a_trace_keeps_its_text_through_a_round(tmp_path: Path) -> None:
    first, second = written(tmp_path, MOONCAKE.replace(" ", "")), tmp_path / "again"
    write_trace(second, TraceFile(first))
    assert second.read_bytes() == first.read_bytes()


def test_an_unfinished_trace_is_never_seen(tmp_path: Path) -> None:
    """The source breaks half-way: what was there stays."""
    good, bad = written(tmp_path, MOONCAKE), tmp_path / "bad"
    bad.write_text(GOOD + "\nbad\n")
    with pytest.raises(TraceError, match="line 2"):
        write_trace(good, TraceFile(bad))
    assert good.read_text() == MOONCAKE
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad", "trace"]
