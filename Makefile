.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
STAMP := .venv/.installed
TORCH_STAMP := .venv-torch/.installed
VLLM_STAMP := .venv-vllm/.installed
export JAX_PLATFORMS ?= cpu
# A killed install leaves no stamp, so the next call starts it again.
REQUIREMENTS := requirements/base.txt requirements/dev.txt requirements/docs.txt requirements/demo.txt
# A file's tests share their fixtures, so a file stays with one worker.
PYTEST := $(PYTHON) -m pytest -n $(or $(WORKERS),2) --dist loadfile

.PHONY: help setup quickstart test test-fast test-vllm lint format torch-env vllm-env demo-gsm8k demo-smollm2 demo-dpo \
  demo-distill demo-grpo-tiny demo-grpo-gsm8k notebooks end-to-end end-to-end-plans handback-matrix benchmark-sft \
  benchmark-trl benchmark-dpo benchmark-distill benchmark-grpo benchmark-checkpoint benchmark-generate soak soak-slice \
  docs dist lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort | expand -t 16

setup: $(STAMP) ## make the environment: .venv with Python 3.12 and the pinned packages

$(STAMP): $(REQUIREMENTS) pyproject.toml scripts/setup.sh
	bash scripts/setup.sh
	@touch $(STAMP)

torch-env: $(TORCH_STAMP) ## make .venv-torch: PyTorch, transformers and TRL, to load exports with and to measure against

$(TORCH_STAMP): requirements/torch.txt scripts/setup_torch.sh
	bash scripts/setup_torch.sh
	@touch $(TORCH_STAMP)

vllm-env: $(VLLM_STAMP) ## make .venv-vllm: the package with vLLM for the CPU, for rollout_engine=vllm

$(VLLM_STAMP): $(STAMP) requirements/vllm.txt requirements/vllm-test.txt scripts/setup_vllm.sh
	bash scripts/setup_vllm.sh
	@touch $(VLLM_STAMP)

quickstart: $(STAMP) ## a chat SFT of a tiny model, then real pre-training resuming it
	rm -rf runs/quickstart
	$(PYTHON) -m train_sft configs/quickstart/sft.yml
	$(PYTHON) scripts/hand_back.py configs/quickstart/sft.yml

test: $(STAMP) ## every test, the slow ones included
	$(PYTEST)

test-fast: $(STAMP) ## the quick tests, four minutes together
	$(PYTEST) -m "not slow"

test-vllm: $(VLLM_STAMP) ## the tests with real vLLM, by the interpreter that has it
	.venv-vllm/bin/python -m pytest -m vllm tests/unit/test_doctor.py tests/integration/test_vllm_*.py

lint: $(STAMP) ## ruff (lint and format), shellcheck and basedpyright
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	git ls-files -z '*.sh' | xargs -0 .venv/bin/shellcheck -x
	.venv/bin/basedpyright

format: $(STAMP) ## format and sort imports in place
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

demo-gsm8k: $(STAMP) ## SFT of a 10 M model on GSM8K, loss on held-out problems
	rm -rf runs/sft_gsm8k
	$(PYTHON) -m train_sft configs/demo/sft_gsm8k.yml

demo-smollm2: $(STAMP) $(TORCH_STAMP) ## import SmolLM2, SFT on GSM8K, export to transformers, resume pre-training
	rm -rf runs/smollm2 runs/sft_smollm2 runs/sft_smollm2-hf
	$(PYTHON) scripts/demo_smollm2.py

demo-distill: $(STAMP) ## half of SmolLM2's layers learn what all of them say about GSM8K, KL on held-out problems
	rm -rf runs/smollm2-teacher runs/distill_smollm2
	$(PYTHON) scripts/demo_distill.py

demo-dpo: $(STAMP) ## SmolLM2 learns to prefer right solutions to wrong ones, accuracy on held-out pairs
	rm -rf runs/dpo_smollm2 runs/dpo_smollm2-merged
	$(PYTHON) scripts/demo_dpo.py

demo-grpo-tiny: $(STAMP) ## SFT of a tiny model on sums mostly wrong, then GRPO with an exact-answer reward, three seeds
	rm -rf runs/grpo_tiny runs/grpo_tiny_*
	$(PYTHON) scripts/demo_grpo_tiny.py

demo-grpo-gsm8k: $(STAMP) ## GRPO of SmolLM2 on GSM8K with the native engine, a dozen updates, each phase timed
	rm -rf runs/grpo_gsm8k
	$(PYTHON) scripts/demo_grpo_gsm8k.py

notebooks: $(STAMP) ## run every notebook from top to bottom, and say how long each took
	$(PYTHON) scripts/run_notebooks.py --output runs/notebooks/executed

end-to-end: $(STAMP) ## the whole circle on the CPU: pre-train, SFT, DPO, GRPO, distil, pre-train, export
	end_to_end/cpu/circle.sh $(MODEL)

end-to-end-plans: $(STAMP) ## dry runs of the circle on a TPU v6e-8 host for four models: memory per device
	for model in qwen3-0.6b qwen2.5-1.5b gemma3-4b llama3.1-8b; do \
	  end_to_end/v6e-8/circle.sh $$model --dry-run || exit 1; done

handback-matrix: $(STAMP) ## every trainer and pre-training read what every other wrote; the table is docs/handback_matrix.md
	$(PYTHON) -m pytest tests/end_to_end/test_handback_matrix.py --handback-table docs/handback_matrix.md
	@cat docs/handback_matrix.md

benchmark-sft: $(STAMP) ## our SFT step against MaxText's own, five pairs
	$(PYTHON) benchmarks/sft_step.py

benchmark-trl: $(STAMP) $(TORCH_STAMP) ## our SFT step against TRL's SFTTrainer at SmolLM2's shape, three pairs
	$(PYTHON) benchmarks/sft_step.py --rivals trl --model smollm2-shape --pairs 3 --steps 8 scan_layers=false

benchmark-distill: $(STAMP) $(TORCH_STAMP) ## our distillation step against TRL's GKDTrainer, three pairs
	$(PYTHON) benchmarks/distillation_step.py

benchmark-dpo: $(STAMP) $(TORCH_STAMP) ## our DPO step against TRL's DPOTrainer and MaxText's own, three pairs each
	$(PYTHON) benchmarks/dpo_step.py --rival trl scan_layers=false
	$(PYTHON) benchmarks/dpo_step.py --rival maxtext

benchmark-grpo: $(STAMP) $(TORCH_STAMP) ## our GRPO by phases, with vLLM where it is, against TRL's GRPOTrainer; generation against Tunix's
	$(PYTHON) benchmarks/grpo_step.py

benchmark-checkpoint: $(STAMP) ## our saves and restores against Orbax alone and MaxText's own, three rounds
	$(PYTHON) benchmarks/checkpoint.py

benchmark-generate: $(STAMP) $(TORCH_STAMP) ## generation here against Tunix's sampler and transformers' generate, seven rounds
	$(PYTHON) benchmarks/generate.py

soak: $(STAMP) ## kills, disk faults, mutated input, random conversations, for hours; it goes on where it ended
	$(PYTHON) -m scripts.soak $(if $(MINUTES),--minutes $(MINUTES))

soak-slice: $(STAMP) ## ten minutes of the soak
	$(PYTHON) -m scripts.soak --slice ci --minutes 10

docs: $(STAMP) ## build the documentation into site/, strictly; it opens without a server
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

dist: $(STAMP) ## build the wheel and the source archive into dist/
	rm -rf dist
	.venv/bin/uv build --quiet --no-build-isolation --python $(PYTHON) --out-dir dist
	@ls dist

lock: $(STAMP) ## pin the newest versions that pyproject.toml and requirements/*.in allow
	bash scripts/lock.sh

clean: ## remove runs and caches; the environment stays
	rm -rf runs .cache .pytest_cache .ruff_cache build dist site
