# Everything needs only Python 3.11 or later with pip and venv: each target sets up what it needs, once.
# Paths are relative, so a checkout whose own path has spaces works too.

PYTHON ?= python3
ARGS ?=
DEVICE ?= cpu
PY := .venv/bin/python -P
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help serve test test-browser test-vllm test-vllm-core demo-vllm soak check bench bench-int8 bench-journal bench-core bench-overload bench-pipeline bench-scale bench-streams bench-store bench-layerwise bench-engine bench-vllm bench-goodput bench-aiperf clean venv model format

help:
	@echo "make serve    serve SmolLM2-135M on http://127.0.0.1:8000   (ARGS='--nodes 2 --decode 2' and so on)"
	@echo "make test     run the tests                                 (ARGS='tests/core -k directory')"
	@echo "make test-browser  the dashboard in a real Chromium, which it installs where it may (two minutes)"
	@echo "make demo-vllm  two vLLM servers on CPU, for prefill and decode, behind one endpoint (3.4 GB the first time)"
	@echo "make test-vllm  the connector, and the gateway before real vLLM servers on CPU (sets them up: 3.4 GB, minutes; then 6 to 10)"
	@echo "make test-vllm-core  what of it CI runs: hits and answers, no faults (some four minutes once it is set up)"
	@echo "make soak     the long versions of tests: thousands of crashes, larger searches, half an hour of kills (two hours)"
	@echo "make check    formatting, lint, types, import rules"
	@echo "make bench    measure this machine"
	@echo "make bench-int8    int8 weights beside float32: speed and accuracy   (ARGS='--threads 1')"
	@echo "make bench-journal   what the Conductor's journal costs"
	@echo "make bench-core    the scheduler and its simulator beside Dynamo's   (ARGS='--trace conversation_trace.jsonl')"
	@echo "make bench-overload  a live cluster at three times what it can serve   (ARGS='--engine timed')"
	@echo "make bench-pipeline  long prompts on one prefill worker, and on two that divide the layers   (ARGS='--lengths 2048')"
	@echo "make bench-scale   ten million blocks in the directory, a million on a node's SSD   (ARGS='--entries 1000000')"
	@echo "make bench-streams  2,000 streams at once through one gateway, and 10,000 requests that wait   (ARGS='--streams 300 --queued 1000')"
	@echo "make bench-store   the KVCache pool beside Mooncake Store     (ARGS=--quick: a smoke test)"
	@echo "make bench-layerwise  storing and loading KVCache while it is computed; gaps of running streams   (ARGS='--tokens 512')"
	@echo "make bench-engine  the torch engine beside vLLM on CPU         (DEVICE=cuda, ARGS='--threads 1 --no-peer')"
	@echo "make bench-vllm    two real vLLM servers with the pool, and without   (ARGS='--trace conversation_trace.jsonl')"
	@echo "make bench-goodput  90 % points, live: pools beside coupled workers, and the simulator beside both   (ARGS='--part torch'; ARGS=--quick: a smoke test)"
	@echo "make bench-aiperf  NVIDIA's AIPerf and moonpool replay measure one cluster   (ARGS='--trace trace.jsonl')"
	@echo "make clean    remove the virtual environment and caches (not the model)"

serve: $(INSTALLED)
	@exec $(PY) -m moonpool serve $(ARGS)

test: $(INSTALLED) model
	$(PY) -m pytest $(ARGS)

test-browser: .venv/browser model
	@command -v chromium >/dev/null || sh tests/browser/install.sh
	$(PY) -m pytest $(or $(ARGS),tests/browser)

.venv/browser: $(INSTALLED)
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[engine,dev,browser]'
	@touch $@

test-vllm: $(INSTALLED) model
	MOONPOOL_VLLM=1 $(PY) -m pytest $(or $(ARGS),tests/connectors tests/live/external)

test-vllm-core: $(INSTALLED) model
	MOONPOOL_VLLM=1 MOONPOOL_INSTALL_SECONDS=420 $(PY) -m pytest -m core tests/connectors tests/live/external

demo-vllm: $(INSTALLED) model
	$(PY) -m moonpool.bench.vllm_demo $(ARGS)

soak: $(INSTALLED) model
	MOONPOOL_SOAK=1 $(PY) -m pytest --timeout 3600 $(or $(ARGS),tests/core tests/store tests/contract tests/trace tests/wire tests/sim tests/live/test_fuzz.py tests/live/test_memory.py tests/live/test_many_streams.py tests/live/test_chaos.py)

check: $(INSTALLED)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: $(INSTALLED) model
	$(PY) -m moonpool.bench.serving $(ARGS)

bench-int8: $(INSTALLED) model
	$(PY) -m moonpool.bench.quantized $(ARGS)

bench-journal: $(INSTALLED)
	$(PY) -m moonpool.bench.journal $(ARGS)

bench-core: $(INSTALLED)
	$(PY) -m moonpool.bench.core $(ARGS)

bench-overload: $(INSTALLED) model
	$(PY) -m moonpool.bench.overload $(ARGS)

bench-pipeline: $(INSTALLED) model
	$(PY) -m moonpool.bench.pipeline $(ARGS)

bench-scale: $(INSTALLED)
	$(PY) -m moonpool.bench.scale $(ARGS)

bench-streams: $(INSTALLED) model
	$(PY) -m moonpool.bench.streams $(ARGS)

bench-store: $(INSTALLED)
	$(PY) -m moonpool.bench.store $(ARGS)

bench-layerwise: $(INSTALLED) model
	$(PY) -m moonpool.bench.layerwise $(ARGS)

bench-engine: $(INSTALLED) model
	$(PY) -m moonpool.bench.engine --device $(DEVICE) $(ARGS)

bench-vllm: $(INSTALLED) model
	$(PY) -m moonpool.bench.vllm $(ARGS)

bench-goodput: $(INSTALLED) model
	$(PY) -m moonpool.bench.goodput $(ARGS)

bench-aiperf: $(INSTALLED) model
	$(PY) -m moonpool.bench.aiperf $(ARGS)

format: $(INSTALLED)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

model: $(INSTALLED)
	@$(PY) -m moonpool pull smollm2

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moonpool needs Python 3.11 or later; this is %s (choose another: make PYTHON=python3.12)" % sys.version.split()[0])'
	@echo "setting up .venv (once; a few minutes on a new machine)"
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt hatchling editables
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[engine,dev]'
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
