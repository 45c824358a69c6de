#!/usr/bin/env bash
# Pre-training, then GRPO, on the CPU.
#   end_to_end/cpu/grpo.sh [MODEL] [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source end_to_end/common.sh
source end_to_end/steps.sh
source end_to_end/cpu/settings.sh
run_steps pretrain grpo
