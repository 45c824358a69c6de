#!/usr/bin/env bash
# The whole circle on the CPU: pre-training, SFT, DPO, GRPO, distillation, pre-training again, export.
#   end_to_end/cpu/circle.sh [MODEL] [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source end_to_end/common.sh
source end_to_end/steps.sh
source end_to_end/cpu/settings.sh
run_steps pretrain sft dpo grpo distill resume export
