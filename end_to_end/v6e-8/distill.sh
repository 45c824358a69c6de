#!/usr/bin/env bash
# Pre-training, then distillation of its model, on a TPU v6e-8 host.
#   end_to_end/v6e-8/distill.sh [MODEL] [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source end_to_end/common.sh
source end_to_end/steps.sh
source end_to_end/v6e-8/settings.sh
run_steps pretrain distill
