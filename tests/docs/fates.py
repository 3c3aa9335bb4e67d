"""Commands of the documentation that its test run leaves out: because another test runs them, or because none can.

Each is the beginning of one command at least. Everything that is not here is run as it stands (`stand.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    test: str
    words: tuple[str, ...]
    """Of the command, that the test's file has as well."""


ELSEWHERE = {
    "make serve ARGS='--prefill 2 --pipeline 2'": Elsewhere(
        "tests/live/test_pipeline.py::test_several_groups_serve_many_at_once", ("prefill", "pipeline")
    ),
    "make serve ARGS='--quantize int8'": Elsewhere(
        "tests/live/test_quantized.py::test_it_answers_and_finds_its_blocks_again", ("quantize", "int8")
    ),
    ".venv/bin/python examples/kv_store.py": Elsewhere(
        "tests/store/test_example.py::test_with_a_pool_of_its_own", ("examples", "kv_store.py")
    ),
    "python caching.py": Elsewhere(
        "tests/live/test_caching.py::test_the_examples_of_the_docs", ("docs/caching.md", "caching.py")
    ),
    "python follow.py": Elsewhere(
        "tests/live/kv_events/test_cluster.py::test_a_subscriber_ends_with_what_the_cluster_shows", ("example(",)
    ),
    "moonpool calibrate": Elsewhere(
        "tests/command/test_calibrate.py::test_the_profile_is_written_and_taken", ("calibrate", "local")
    ),
    "moonpool goodput": Elsewhere(
        "tests/command/test_goodput_command.py::test_each_is_measured_at_its_own_point_and_in_overload", ("goodput",)
    ),
    "moonpool gateway --conductor 127.0.0.1:9000 --instances vllm.yaml": Elsewhere(
        "tests/live/external/test_command.py::test_it_serves_openai_s_api_from_the_servers",
        ("gateway", "--instances", "vllm.yaml", "--port"),
    ),
    "curl http://127.0.0.1:8080/v1/models": Elsewhere(
        "tests/live/external/test_command.py::test_it_serves_openai_s_api_from_the_servers", ("/v1/models",)
    ),
    "moonpool status --url": Elsewhere("tests/command/test_status.py::test_once_prints_one_table", ("status",)),
    "moonpool replay trace.jsonl --url": Elsewhere(
        "tests/bench/test_aiperf_bench.py::test_replay_is_run_as_a_user_runs_it", ("trace.jsonl", "endpoint.url")
    ),
    "KEY=": Elsewhere(
        "tests/live/external/test_command.py::test_servers_are_registered_and_taken_out_with_an_admin_key", ("bearer",)
    ),
    'curl -H "$KEY"': Elsewhere(
        "tests/live/external/test_command.py::test_servers_are_registered_and_taken_out_with_an_admin_key",
        ("/cluster/instances", "delete", "bearer"),
    ),
    "python -m vllm.entrypoints.openai.api_server": Elsewhere(
        "tests/connectors/test_with_vllm.py::test_what_one_has_computed_the_other_loads",
        ("MoonpoolConnector", "moonpool.connectors.vllm", "kv_both", "kv_load_failure_policy", "recompute"),
    ),
}

NOT_RUN = {
    "HF_HOME=hf HF_HUB_OFFLINE=1 aiperf": "AIPerf is no dependency of ours; `make bench-aiperf` sets it up and runs it",
    "pip ": "fetches and removes packages; extras, files and versions that it names are looked up",
    "moonpool node --conductor 127.0.0.1:9000 --id node-0 --run-dir /run/user/$UID/pool": "is for a large machine, in "
    "place of the command before it",
}


def is_left_out(command: str) -> bool:
    return command.startswith((*ELSEWHERE, *NOT_RUN))
