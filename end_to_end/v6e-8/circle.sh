#!/usr/bin/env bash
# The whole circle on a TPU v6e-8 host: pre-training, SFT, DPO, GRPO, distillation, pre-training again, export.
#   end_to_end/v6e-8/circle.sh [MODEL] [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source end_to_end/common.sh
source end_to_end/steps.sh
source end_to_end/v6e-8/settings.sh
run_steps pretrain sft dpo grpo distill resume export
