"""Requests that schemathesis makes from /openapi.json, fit and unfit, against a whole cluster on the timed engine."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from moonpool.bench.cluster import RunningCluster, running_cluster
from tests.keys import bearer, make_key
from tests.live.kit import audit
from tests.soak import SOAK

pytestmark = pytest.mark.live

CASES = 10_000 if SOAK else 1000
"""Of all operations together, with keys and without."""
ANSWER_SECONDS = 30.0
"""Any answer takes less, on a machine that is busy."""
CONTEXT = 8192
FEW_TOKENS = 3
ALLOWED_5XX = {"keys_busy", "no_conductor", "no_instance", "attempts"}
"""Codes of 503, which is for a cluster that is too busy to say more."""
BEYOND_SCHEMAS = {"context_length_exceeded", "context_mismatch", "never_fits", "instance_refused"}
"""Codes of what no schema can say."""
CROSS = {"min_tokens", "max_tokens", "top_logprobs", "stream_options", "logprobs"}
"""Members that go by others."""
BY_CONTENT = {"prompt", "messages", "after", "x-moonpool-cache", "x-slo-ttft-ms", "x-slo-tpot-ms"}
"""What is empty as tokens, names a page or a context that is not there, or is zero."""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(params=["without keys", "with keys"])
def served(request: pytest.FixtureRequest, smollm2: object, tmp_path: Path) -> Iterator[tuple[RunningCluster, str]]:
    """A cluster, and an admin key or nothing."""
    file = tmp_path / "keys.json"
    key = make_key(file, "operator", admin=True) if request.param == "with keys" else ""
    flags = ("--keys", str(file)) if key else ()
    timed = ("--engine", "timed", "--request-timeout", "20", "--caching-dir", "off")
    with running_cluster(*timed, *flags) as cluster:
        yield cluster, key


def test_whatever_is_sent_is_answered_as_described(served: tuple[RunningCluster, str]) -> None:
    cluster, key = served
    document = requests.get(f"{cluster.url}/openapi.json", timeout=ANSWER_SECONDS).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    sent: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        attack = Attack(cluster.url, session, bearer(key) if key else {}, document, sent)
        weights = {operation.label: weight_of(operation) for operation in operations}
        for operation in operations:
            cases = CASES // 2 * weights[operation.label] // sum(weights.values()) // 2 + 1
            for mode in GenerationMode:
                attack.run(operation, mode, cases)
    assert {200, 400} <= {status for label, status in sent if label == "POST /v1/completions"}, sent
    log = cluster.log()
    assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
    if not key:
        audit(cluster)
        return
    usage = requests.get(f"{cluster.url}/cluster/keys", headers=bearer(key), timeout=ANSWER_SECONDS).json()
    assert [each["streams"] for each in usage["keys"]] == [0]
    state = requests.get(f"{cluster.url}/cluster", headers=bearer(key), timeout=ANSWER_SECONDS).json()
    assert {name: state["gateway"][name] for name in ("seats_taken", "running", "waiting")} == {
        "seats_taken": 0,
        "running": 0,
        "waiting": 0,
    }
    assert not sum(values.get("integrity_failures", 0) for values in state["counters"].values())


def weight_of(operation: Any) -> int:
    """Its share of the cases."""
    if operation.path in ("/v1/chat/completions", "/v1/completions"):
        return 16
    return 4 if operation.method == "post" else 1


class Attack:
    """`sent` counts answers by operation and status."""

    def __init__(
        self,
        url: str,
        session: requests.Session,
        headers: dict[str, str],
        document: dict[str, Any],
        sent: Counter[tuple[str, int]],
    ) -> None:
        self._url = url
        self._session = session
        self._headers = headers
        self._events = {
            "/v1/chat/completions": validator(document, "ChatCompletionChunk"),
            "/v1/completions": validator(document, "TextCompletionChunk"),
        }
        self._problem = validator(document, "Problem")
        self.sent = sent

    def run(self, operation: Any, mode: GenerationMode, cases: int) -> None:
        """So many cases of one operation; raises what hypothesis says of one that fails."""

        @seed(int(os.environ.get("MOONPOOL_SEED", "1")))
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if not SOAK else [Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            self._ask(case, mode)

        with contextlib.suppress(Unsatisfiable):  # where nothing of an operation can be wrong
            one()

    def _ask(self, case: Any, mode: GenerationMode) -> None:
        case.body = whole(case.body)
        if case.operation.path in self._events:
            make_short(case.body)
        response = case.call(base_url=self._url, session=self._session, headers=self._headers, timeout=ANSWER_SECONDS)
        self.sent[case.operation.label, response.status_code] += 1
        said = f"{case.as_curl_command()}\n{response.status_code} {response.text[:500]}"
        if response.status_code >= 500:
            code = response.json().get("error", {}).get("code")
            assert response.status_code in (503, 504), said
            assert code in ALLOWED_5XX or response.status_code == 504, said
        case.validate_response(response, checks=CHECKS)
        kind = response.headers.get("content-type", [""])[0]
        if kind.startswith("text/event-stream"):
            self._check_events(self._events[case.operation.path], response.text)
        if mode is GenerationMode.POSITIVE and response.status_code == 400:
            error = response.json()["error"]
            param = (error["param"] or "").partition("[")[0]
            assert error["code"] in BEYOND_SCHEMAS or param in CROSS | BY_CONTENT, said

    def _check_events(self, event: Any, text: str) -> None:
        lines = [line for line in text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", text[-500:]
        for line in lines[:-1]:
            value = json.loads(line.removeprefix("data: "))
            (self._problem if "error" in value else event).validate(value)


def whole(value: Any) -> Any:
    """To a schema 1.0 is an integer; the gateway wants it written as one."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [whole(member) for member in value]
        case dict():
            return {name: whole(member) for name, member in value.items()}
    return value


def make_short(body: Any) -> None:
    """Answers of thousands of tokens take minutes, and show nothing more."""
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and FEW_TOKENS < body[name] <= CONTEXT:
            body[name] = FEW_TOKENS
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = FEW_TOKENS


def validator(document: dict[str, Any], name: str) -> Any:
    schemas = document["components"]["schemas"]
    return jsonschema_rs.validator_for(schemas[name] | {"components": {"schemas": schemas}})
