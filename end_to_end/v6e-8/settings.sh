# The settings of a TPU v6e-8 host, for each model; nowhere else. Sourced after common.sh and steps.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034  # common.sh and steps.sh read them

read_arguments qwen3-0.6b "$@"

OUTPUT="${OUTPUT:-${PWD}/runs/end_to_end/v6e-8/${MODEL}}" # or gs://bucket/...
WORK="${WORK:-runs/end_to_end/v6e-8/${MODEL}}"            # on this machine's disk
COMMON=("base_output_directory=${OUTPUT}" "steps=${STEPS}" hf_path=json skip_jax_distributed_system=true
  enable_goodput_recording=false log_every=1 num_vocab_tiling=8 remat_policy=full)

if [[ -n "${DRY_RUN}" ]]; then
  # Eight devices of a CPU in place of the TPU's, with its chips' memory: 32 GB, of which XLA gives programs 31.25 GiB.
  export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 TF_CPP_MIN_LOG_LEVEL=3 HF_HUB_OFFLINE=1
  COMMON+=(device_memory_gib=31.25)
fi

# per_device_batch_size is in sequences, in DPO in pairs; GRPO's times 8 devices is completions, 8 of each prompt.
MODEL_CONFIG=""
case "${MODEL}" in
  qwen3-0.6b)
    MODEL_KEYS=(tokenizer_type=huggingface tokenizer_path=maxtext://tokenizers/qwen3-tokenizer
      ici_data_parallelism=2 ici_fsdp_parallelism=4 max_target_length=2048)
    SFT=(per_device_batch_size=8)
    DPO=(per_device_batch_size=4)
    GRPO=(per_device_batch_size=8 rl.grpo_beta=0.04)
    DISTILL=(per_device_batch_size=4)
    STUDENT_LAYERS=14
    ;;
  qwen2.5-1.5b)
    # MaxText ships no tokenizer of Qwen2.5. Qwen3's has the same vocabulary; SOURCE=FOLDER brings the model's own.
    [[ -n "${SOURCE}" ]] || echo "note: ${MODEL}: Qwen3's tokenizer stands in for its own; SOURCE=FOLDER brings that"
    MODEL_KEYS=(tokenizer_type=huggingface tokenizer_path=maxtext://tokenizers/qwen3-tokenizer
      ici_fsdp_parallelism=8 max_target_length=2048)
    SFT=(per_device_batch_size=4)
    DPO=(per_device_batch_size=2)
    GRPO=(per_device_batch_size=8 rl.grpo_beta=0.04)
    DISTILL=(per_device_batch_size=4)
    STUDENT_LAYERS=14
    ;;
  gemma3-4b)
    MODEL_KEYS=(tokenizer_type=sentencepiece tokenizer_path=maxtext://tokenizers/tokenizer.gemma3 chat_template=gemma
      ici_fsdp_parallelism=8 max_target_length=2048)
    SFT=(per_device_batch_size=2)
    DPO=(per_device_batch_size=1)
    GRPO=(per_device_batch_size=4 rl.grpo_beta=0.04)
    DISTILL=(per_device_batch_size=2)
    STUDENT_LAYERS=0 # its layers are of two kinds, so the student has them all, and starts before what taught its teacher
    ;;
  llama3.1-8b)
    MODEL_KEYS=(tokenizer_type=tiktoken tokenizer_path=maxtext://tokenizers/tokenizer_llama3.tiktoken
      chat_template=llama3 ici_fsdp_parallelism=8 max_target_length=2048)
    SFT=(per_device_batch_size=2)
    DPO=(per_device_batch_size=1)
    # With a reference, all logits at once and 8 sequences a device it needs 41 GiB of each, and is refused.
    GRPO=(per_device_batch_size=2)
    DISTILL=(per_device_batch_size=1)
    STUDENT_LAYERS=16
    ;;
  *) fail "${MODEL}: no such model; there are qwen3-0.6b, qwen2.5-1.5b, gemma3-4b and llama3.1-8b" ;;
esac
MODEL_KEYS=("model_name=${MODEL}" "${MODEL_KEYS[@]}")
GRPO=(max_prefill_predict_length=256 max_target_length=1024 rl.num_generations=8 "${GRPO[@]}")
