# make demo and make test set up everything they need; a second run is quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# uv installs in seconds what takes pip minutes. Where only pip knows the way to a registry, pip does it.
# $(call install,ENVIRONMENT,WHAT)
install = $(BIN)/python -m uv pip install --quiet --native-tls --python $(1)/bin/python $(2) \
	|| $(1)/bin/python -m pip install --quiet --no-compile --no-warn-conflicts --disable-pip-version-check $(2)
OLDEST := langchain-core==0.3.34 llama-index-core==0.13.0 'langchain<0.4'
CLIENTS_langchain := langchain-cohere langchain-community infinity-client langchain-nvidia-ai-endpoints haystack-ai \
	huggingface-api-haystack rerankers
CLIENTS_llama := $(addprefix llama-index-postprocessor-,cohere-rerank jinaai-rerank tei-rerank nvidia-rerank \
	siliconflow-rerank)
CLIENTS_newest := 'cohere>=7'
BASE := '.[langchain,llama-index,serve,eval]'

# The tests of `make test`, with the lines and branches that none of them runs.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not ray and not browser" --cov --cov-report=term

.PHONY: demo test coverage test-all test-oldest test-clients test-without-torch environments docs lint clean

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not ray and not browser"

# What `make test` leaves out: slow tests, a browser, Ray clusters (these by themselves: each is several processes).
test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "(slow or browser) and not ray"
	$(BIN)/python -m pytest -m ray

# What the three below need.
environments: $(VENV)-oldest/.installed $(VENV)-newest/.installed $(VENV)-base/.installed $(foreach group,langchain llama newest,$(VENV)-clients-$(group)/.installed)

# Client libraries of other rerankers against the service; they want versions that do not go together.
test-clients: $(foreach group,langchain llama newest,$(VENV)-clients-$(group)/.installed)
	@set -e; for group in langchain llama newest; do \
		$(VENV)-clients-$$group/bin/python -m pytest tests/service/test_clients.py; done

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The adapters with the oldest releases of LangChain and LlamaIndex that are supported; all else comes from $(VENV).
test-oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest tests/adapters/test_adapter.py tests/adapters/test_langchain.py tests/adapters/test_llama_index.py \
		tests/adapters/test_on_error.py

# The adapters with the newest releases, and in LangChain's agents.
test-newest: $(VENV)-newest/.installed
	$(VENV)-newest/bin/python -m pytest tests/adapters
	$(VENV)-newest/bin/python -m pytest tests/test_docs.py -k "notebook and agents"

# The package without torch, in an environment with nothing else; $(VENV) compares.
test-without-torch: $(VENV)-base/.installed
	RSRANK_BASE_PYTHON=$(abspath $(VENV))-base/bin/python $(BIN)/python -m pytest tests/test_without_torch.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing rsrank-rag into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt uv
	@$(call install,$(VENV),-c constraints.txt -e .)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing torch and the tools for tests (once, a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	@$(call install,$(VENV),-c constraints.txt -e '.[dev]')
	@touch $@

# An environment on top of $(VENV): what is installed here goes before what is there.
over = $(PYTHON) -m venv --clear $(1) && $(1)/bin/python -c 'import site, sys; \
	open(site.getsitepackages()[0] + "/rest.pth", "w").write(sys.argv[1])' \
	$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')

$(VENV)-oldest/.installed: $(VENV)/.installed-dev
	@echo "Installing the oldest LangChain and LlamaIndex ..."
	@$(call over,$(VENV)-oldest)
	@$(call install,$(VENV)-oldest,$(OLDEST))
	@# langchain of that age asks for numpy 1, this package for numpy 2.
	@$(call install,$(VENV)-oldest,'numpy>=2')
	@touch $@

$(VENV)-newest/.installed: $(VENV)/.installed-dev
	@echo "Installing the newest LangChain and LlamaIndex ..."
	@$(call over,$(VENV)-newest)
	@$(call install,$(VENV)-newest,-U langchain langchain-core llama-index-core)
	@touch $@

# The size in megabytes and the number of packages are those without the tools for tests.
$(VENV)-base/.installed: pyproject.toml constraints.txt $(shell find rsrank_rag -type f) | $(VENV)/.installed-dev
	@echo "Installing rsrank-rag without torch ..."
	@$(PYTHON) -m venv --clear $(VENV)-base
	@$(call install,$(VENV)-base,-c constraints.txt .)
	@du -sm $(VENV)-base | cut -f1 > $(VENV)-base/megabytes
	@ls -d $(VENV)-base/lib/python*/site-packages/*.dist-info | wc -l > $(VENV)-base/packages
	@$(call install,$(VENV)-base,-c constraints.txt $(BASE))
	@touch $@

$(VENV)-clients-%/.installed: $(VENV)/.installed-dev
	@echo "Installing clients ($*) ..."
	@$(call over,$(VENV)-clients-$*)
	@$(call install,$(VENV)-clients-$*,$(CLIENTS_$*))
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-base $(VENV)-clients-*
