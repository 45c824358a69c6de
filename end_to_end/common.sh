# What the end-to-end scripts share: options, running and checking a step, and the table at the end. It is sourced.
# shellcheck shell=bash
# shellcheck disable=SC2034  # settings.sh and steps.sh read what is set here

PYTHON="${PYTHON:-.venv/bin/python}"
POSTTRAIN="${POSTTRAIN:-.venv/bin/posttrain}"
STEPS="${STEPS:-2}"                                             # updates of each step
SOURCE="${SOURCE:-}"                                            # a HuggingFace folder or a GGUF file to start from
CHATS="${CHATS:-configs/data/quickstart_chat.jsonl}"            # for SFT and distillation
PAIRS="${PAIRS:-configs/data/quickstart_pairs.jsonl}"           # for DPO
PROMPTS="${PROMPTS:-configs/data/sums.jsonl}"                   # for GRPO
PRETRAIN_DATA="${PRETRAIN_DATA:-dataset_type=synthetic}"        # MaxText's keys, separated by spaces

MODEL=""
DRY_RUN=""
EXTRA=()
PLAN=()
DOING=""
declare -A OUTCOME TOOK

#######################################
# Reads a script's arguments: [MODEL] [--dry-run] [key=value ...].
# Globals: MODEL, DRY_RUN, EXTRA, set
# Arguments: the default model, then the script's own
#######################################
read_arguments() {
  MODEL="$1"
  shift
  local argument
  for argument in "$@"; do
    case "${argument}" in
      --dry-run) DRY_RUN=yes ;;
      -*) fail "${argument}: no such option; there is --dry-run" ;;
      *=*) EXTRA+=("${argument}") ;;
      *) MODEL="${argument}" ;; # settings.sh knows which there are
    esac
  done
}

fail() {
  echo "error: $0: $*" >&2
  exit 2
}

#######################################
# Runs steps one after the other, and prints a table of them whatever becomes of them.
# Globals: PLAN, SOURCE; and those of `step`
# Arguments: names; each has a function step_NAME in steps.sh
#######################################
run_steps() {
  PLAN=("$@")
  [[ -z "${SOURCE}" ]] || PLAN=(import "$@")
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  mkdir -p "${WORK}"
  local name
  for name in "${PLAN[@]}"; do
    DOING="${name}"
    SECONDS=0
    printf '\n== %s\n' "${name}"
    "step_${name}"
    TOOK["${name}"]="${SECONDS}"
  done
}

#######################################
# Runs a step's command, unless what it writes is there already, and checks what it wrote.
# Globals: DOING, DRY_RUN, OUTCOME
# Arguments: what it writes; what `posttrain inspect --require` is to find there; --; the command
#######################################
step() {
  local tree="$1" needed=()
  shift
  while [[ "$1" != "--" ]]; do
    needed+=("$1")
    shift
  done
  shift
  if [[ -n "${DRY_RUN}" ]]; then
    "$@"
    OUTCOME["${DOING}"]="planned"
  elif [[ "${tree}" == *://* || -e "${tree}" ]] && holds "${tree}" "${needed[@]}" > /dev/null 2>&1; then
    echo "passed over: ${tree} has ${needed[*]}"
    OUTCOME["${DOING}"]="passed over, was done"
  else
    "$@"
    holds "${tree}" "${needed[@]}" > /dev/null
    echo "checked: ${tree} has ${needed[*]}"
    OUTCOME["${DOING}"]="passed"
  fi
}

# What a step cannot do in a dry run, since it is of what other steps write.
leave_out() {
  echo "left out of a dry run: $*"
  OUTCOME["${DOING}"]="left out of a dry run"
}

holds() {
  local tree="$1"
  shift
  "${POSTTRAIN}" inspect "${tree}" --require "$@"
}

finish() {
  local status=$? name
  printf '\n%-12s %-24s %8s\n' step outcome seconds
  for name in "${PLAN[@]}"; do
    [[ "${status}" -eq 0 || "${name}" != "${DOING}" ]] || OUTCOME["${name}"]="FAILED"
    printf '%-12s %-24s %8s\n' "${name}" "${OUTCOME["${name}"]:-not run}" "${TOOK["${name}"]:-}"
  done
  [[ "${status}" -eq 0 ]] || echo "error: $0: ${DOING} failed; mend it, and the next call goes on from there" >&2
  exit "${status}"
}

# Of `key=value` arguments, the last of each key.
last_of_each() {
  local -A found=()
  local argument
  for argument in "$@"; do found["${argument%%=*}"]="${argument}"; done
  printf '%s\n' "${found[@]}"
}
