# Everything happens in .venv; a second run of any target needs no network.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test laws pairs sidecars mutants lint live compare compare-pd bench bench-full soak proto clean

demo: $(STAMP)
	$(BIN)/dyn-chaos demo

test: $(STAMP)
	$(BIN)/pytest

# The laws on examples that no run has seen yet: a seed of its own each time, told if it fails.
laws: $(STAMP)
	$(BIN)/pytest properties --dyn-seed $$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# Prefill/decode pairs in the simulator: either leg's worker dies in every phase (some minutes).
pairs: $(STAMP)
	$(BIN)/dyn-chaos simulate --pairs --seeds 1000

# Workers behind sidecars in the simulator: either of the two dies or hangs, leases lapse (some minutes).
sidecars: $(STAMP)
	$(BIN)/dyn-chaos simulate --sidecars --seeds 1000

# Bugs planted in the proxy and the sidecar, one at a time: the simulator must find each (some minutes).
mutants: $(STAMP)
	$(BIN)/python tests/mutants/hunt.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Stock SGLang on the CPU: downloads about 2 GB into a cache outside the checkout, once.
live: $(STAMP)
	bash tests/live/run.sh

# The same requests to a stock engine directly, through us and through sglang-router, which is installed into a cache.
compare: $(STAMP)
	PROGRAM=compare.py PYTHONPATH=bench bash tests/live/run.sh

# The same before mock prefill/decode pairs, without an engine.
compare-pd: $(STAMP)
	cd tests/live && PYTHONPATH=../../bench:../.. ../../$(BIN)/python compare_pd.py

# Benchmarks need cargo; the peers are installed into a cache outside the checkout, once.
bench: $(STAMP)
	bash bench/build.sh
	cd bench && ../$(BIN)/python run.py --workloads A,B,B-paced,C,C-paced,D --reps 3

# All of docs/performance.md's tables, into bench/results/ (an hour, on a quiet machine). One tool that fails stops no
# other.
FULL = "run.py --peers dyn-relay,sglang-router,smg,nginx,relay --workloads all --reps 3 --json results/full.json" \
	"run.py --peers dyn-relay-off,sglang-router --workloads A,D,D-inc --reps 3 --json results/full-off.json" \
	"run.py --peers dyn-relay-coalesce,sglang-router --workloads B-fast,E --reps 3 --json results/full-coalesce.json" \
	"run.py --peers dyn-relay,dyn-relay-2 --workloads A --reps 3 --unpinned --json results/full-processes.json" \
	"migration.py --reps 3 --json results/full-migration.json" \
	"migration.py --streams 100 --retry-permits 0 --reps 3 --json results/full-migration-at-once.json" \
	"memory.py --peers dyn-relay,dyn-relay-capped --json results/full-memory.json" \
	"plot.py results/full.json results/full.svg"
bench-full: $(STAMP)
	bash bench/build.sh
	@cd bench; failed=0; for tool in $(FULL); do ../$(BIN)/python $$tool || failed=1; done; exit $$failed

soak: $(STAMP)
	bash bench/build.sh
	cd bench && ../$(BIN)/python soak.py

# Python from the .proto, by the compiler whose code runs with the oldest protobuf of pyproject.toml.
proto: .venv-proto/.installed
	.venv-proto/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/dyn_relay/grpc/sglang.proto

.venv-proto/.installed: Makefile
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.75.1
	touch $@

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-proto .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
