# One verb for each need; CI runs the same verbs. `make` alone lists them.

PYTHON ?= python3
VENV := .venv/bin
PREPARE := PYTHONPATH=tests $(PYTHON) -m testbed.prepare --quiet-when-done
RELEASE := PYTHONPATH=.:tests $(VENV)/python -m release
GROUPS_PYTEST := PYTHONPATH=tests $(PYTHON) -m testbed.groups

.DEFAULT_GOAL := help
.PHONY: help prepare demo demo-keep demo-down test test-fast test-apiserver test-engine test-node test-matrix test-faults test-versions test-properties \
	bench bench-operator bench-dashboard check generate verify docs release-check release publish clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

prepare: ## Install and build everything that demo and tests need (about 15 minutes the first time)
	@PYTHONPATH=tests $(PYTHON) -m testbed.prepare node

demo: ## Two tensor-parallel sizes share one cache on a real Kubernetes node; PREFILL=4,2 DECODE=1 CLUSTER=new|existing
	@PYTHONPATH=tests $(PYTHON) -m testbed.start_demo

demo-keep: ## The same, and leave the cluster running
	@PYTHONPATH=tests $(PYTHON) -m testbed.start_demo --keep

demo-down: ## Remove the cluster that demo-keep left
	@PYTHONPATH=tests $(PYTHON) -m testbed.cluster down

test: ## All tests, group after group, with one end-to-end run on the one-node cluster
	@$(GROUPS_PYTEST) fast apiserver engine node

test-fast: ## Tests that need Python packages only (four minutes)
	@$(GROUPS_PYTEST) fast

test-apiserver: ## Contract tests on a real kube-apiserver
	@$(GROUPS_PYTEST) apiserver

test-engine: ## Real vLLM on CPU with a real Mooncake store
	@$(GROUPS_PYTEST) engine

test-node: ## Every story on the one-node cluster; writes docs/benchmarks/node.md (half an hour)
	@$(GROUPS_PYTEST) node scenario; code=$$?; PYTHONPATH=tests $(PYTHON) -m testbed.node_table && exit $$code

test-matrix: ## Every TP size and layout writes for every other; writes docs/benchmarks/matrix.md (half an hour)
	@$(GROUPS_PYTEST) matrix

test-faults: ## One fault at a time under traffic on two real engines; writes docs/reliability.md (half an hour)
	@$(GROUPS_PYTEST) faults

test-versions: ## Every supported version of vLLM, Mooncake and Kubernetes, built on demand; writes tables in docs/benchmarks (an hour)
	@$(GROUPS_PYTEST) versions

test-properties: ## Property tests with new random cases, ten times as many as `make test` tries (five minutes)
	@$(GROUPS_PYTEST) properties

bench-operator: ## The operator under load on a real kube-apiserver; writes docs/benchmarks/operator.md (ten minutes)
	@$(PREPARE) apiserver
	@$(PREPARE) engine
	PYTHONPATH=.:connector:operator:tests $(VENV)/python -m bench.operator_load

bench: ## Transfers, requests and lookups against competitors; writes docs/benchmarks/transfers.md (a quarter of an hour)
	@$(PREPARE) engine
	PYTHONPATH=.:connector:operator:tests $(VENV)/python -m bench.run

bench-dashboard: ## The dashboard's queries on real engines; draws docs/figures/dashboard.svg (five minutes)
	@$(PREPARE) node
	@$(PREPARE) apiserver
	PYTHONPATH=.:connector:operator:tests $(VENV)/python -m bench.dashboard

check: ## Lint, format, types and import contracts
	@$(PREPARE) fast
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy connector operator tests bench release
	$(VENV)/lint-imports

generate: ## Write the generated files (version, CRD, reference pages, figures, dashboard)
	@$(PREPARE) fast
	$(RELEASE) version
	$(VENV)/python -m kvshare_operator.api.crd
	$(VENV)/python docs/generate.py

verify: ## Fail when a generated file is not what its source says
	@$(PREPARE) fast
	$(RELEASE) version --check
	$(VENV)/python -m kvshare_operator.api.crd --check
	$(VENV)/python docs/generate.py --check

docs: ## The documentation as a site, in build/site
	@$(PREPARE) fast
	NO_MKDOCS_2_WARNING=true $(VENV)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

release-check: ## Build wheel, chart and SBOM into build/release and check all that a release consists of
	@$(PREPARE) apiserver
	@$(RELEASE) check

release: ## Set VERSION everywhere, date the changelog, check; prints what publish will do
	@$(PREPARE) apiserver
	@$(RELEASE) prepare $(VERSION)

publish: ## Push images, chart and tag of what release has prepared; needs docker, helm and a signing key
	@$(PREPARE) fast
	@$(RELEASE) publish

clean: ## Delete what the checkout's own verbs made here; ~/.cache/kvshare stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
