# The steps: each a function that runs one command and says what must then be on disk. It is sourced.
# shellcheck shell=bash
# shellcheck disable=SC2154  # the settings of a machine set what is used here

FROM="${FROM:-}"       # the weights that the next step starts from
TAUGHT="${TAUGHT:-}"   # those a student starts from where it has its teacher's shape

# A trainer's configuration: its defaults, below what describes the model.
config_of() {
  local path="${WORK}/$1.yml" model="${MODEL_CONFIG}"
  [[ -z "${SOURCE}" || -n "${DRY_RUN}" ]] || model="${OUTPUT}/import/model.yml"
  printf 'base_config: [%s]\n' "$1.yml${model:+, ${model}}" > "${path}"
  echo "${path}"
}

#######################################
# Trains, from the weights of the step before.
# Arguments: trainer's command, its file in configs, then key=value
#######################################
train() {
  local trainer="$1" config keys=() options=()
  config="$(config_of "$2")"
  shift 2
  [[ -z "${DRY_RUN}" ]] || options=(--dry-run --no-compile)
  mapfile -t keys < <(last_of_each "${COMMON[@]}" "${MODEL_KEYS[@]}" "$@" "${EXTRA[@]}")
  "${POSTTRAIN}" "${trainer}" "${config}" "${keys[@]}" "${options[@]}"
}

starting_weights() {
  [[ -z "${FROM}" ]] || echo "load_parameters_path=${FROM}"
}

step_import() {
  if [[ -n "${DRY_RUN}" ]]; then
    leave_out "${SOURCE} is read where it is"
    return
  fi
  step "${OUTPUT}/import" layout=weights load_parameters_path=yes -- "${POSTTRAIN}" import "${SOURCE}" "${OUTPUT}/import"
  FROM="${OUTPUT}/import/0/items"
}

#######################################
# Real pre-training, of new weights, of imported ones, or going on from a run's whole state.
# Arguments: its run's name, the step to end at, the configuration its model is in, then key=value
#######################################
pretrain() {
  local name="$1" last="$2" config="$3" keys=()
  shift 3
  mapfile -t keys < <(last_of_each "${COMMON[@]}" "${MODEL_KEYS[@]}" "hf_train_files=${CHATS}" "steps=${last}" "$@")
  step "${OUTPUT}/${name}" "step=${last}" layout=maxtext resumable=true -- \
    "${PYTHON}" end_to_end/pretrain.py "${config}" "${keys[@]}" --run-name "${name}" \
    --data "${PRETRAIN_DATA}" --log "${WORK}/${name}.log"
}

step_pretrain() {
  if [[ -n "${DRY_RUN}" ]]; then
    leave_out "MaxText's own pre-training plans nothing"
    return
  fi
  local start
  start="$(starting_weights)"
  pretrain pretrain "${STEPS}" "$(config_of sft)" ${start:+"${start}"}
  # Pre-training names a step's folder by the step before.
  FROM="${OUTPUT}/pretrain/checkpoints/$((STEPS - 1))/items"
  TAUGHT="${FROM}"
}

step_sft() {
  local start
  start="$(starting_weights)"
  step "${OUTPUT}/sft" "step=${STEPS}" layout=maxtext resumable=true data_position=true -- \
    train sft sft run_name=sft "hf_train_files=${CHATS}" "${SFT[@]}" ${start:+"${start}"}
  written sft "checkpoints/${STEPS}/items"
  TAUGHT="${FROM}"
}

step_dpo() {
  local start
  start="$(starting_weights)"
  step "${OUTPUT}/dpo" "step=${STEPS}" layout=maxtext resumable=true data_position=true -- \
    train dpo dpo run_name=dpo "hf_train_files=${PAIRS}" "${DPO[@]}" ${start:+"${start}"}
  written dpo "checkpoints/${STEPS}/items"
}

step_grpo() {
  local start
  start="$(starting_weights)"
  step "${OUTPUT}/grpo" "step=${STEPS}" layout=maxtext load_full_state_path=yes data_position=true -- \
    train grpo grpo run_name=grpo "hf_train_files=${PROMPTS}" "${GRPO[@]}" ${start:+"${start}"}
  written grpo "checkpoints/actor/${STEPS}/items"
}

step_distill() {
  # A dry run reads no weights, and its teacher's are not there yet: this name is looked for nowhere.
  local keys=("teacher_overrides.load_parameters_path=${FROM:-dry-run://teacher}")
  if [[ "${STUDENT_LAYERS}" -gt 0 ]]; then
    keys+=(override_model_config=true "student_overrides.base_num_decoder_layers=${STUDENT_LAYERS}"
      student_init_from_teacher_layers=2)
  elif [[ -n "${TAUGHT}" ]]; then
    keys+=("load_parameters_path=${TAUGHT}")
  fi
  step "${OUTPUT}/distill" "step=${STEPS}" layout=maxtext resumable=true data_position=true -- \
    train distill distillation run_name=distill "hf_train_files=${CHATS}" "${DISTILL[@]}" "${keys[@]}"
  written distill "checkpoints/${STEPS}/items"
}

# The student's model by itself, with its tokenizer.
student_config() {
  local path="${WORK}/student.yml" keys=("${MODEL_KEYS[@]}") key
  [[ "${STUDENT_LAYERS}" -eq 0 ]] || keys+=("base_num_decoder_layers=${STUDENT_LAYERS}" override_model_config=true)
  {
    cat "$(config_of sft)"
    for key in "${keys[@]}"; do echo "${key/=/: }"; done
  } > "${path}"
  echo "${path}"
}

step_resume() {
  if [[ -n "${DRY_RUN}" ]]; then
    leave_out "MaxText's own pre-training plans nothing"
    return
  fi
  pretrain resume "$((STEPS + 2))" "$(student_config)" "load_full_state_path=${FROM}"
  FROM="${OUTPUT}/resume/checkpoints/$((STEPS + 1))/items"
}

# The last weights as a HuggingFace folder, which is read back.
step_export() {
  if [[ -n "${DRY_RUN}" ]]; then
    leave_out "it is of weights"
    return
  fi
  local parameters
  parameters="$(parameters_of "${FROM}")"
  step "${WORK}/export/maxtext" layout=weights load_parameters_path=yes "parameters=${parameters}" -- \
    export_and_read_back
}

export_and_read_back() {
  rm -rf "${WORK}/export"
  mkdir -p "${WORK}/export"
  "${POSTTRAIN}" export "${FROM}" "${WORK}/export/huggingface" --config "$(student_config)"
  "${POSTTRAIN}" import "${WORK}/export/huggingface" "${WORK}/export/maxtext"
}

parameters_of() {
  "${POSTTRAIN}" inspect "$1" --require layout=maxtext | sed -n 's/^  parameters *\([0-9,]*\).*/\1/p' | tr -d ,
}

written() {
  [[ -n "${DRY_RUN}" ]] || FROM="${OUTPUT}/$1/$2"
}
