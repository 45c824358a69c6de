"""The vLLM engine: real vLLM in this process, on the CPU or on CUDA, with a live MaxText model's weights.

vLLM gets a folder with a config.json made of the run's configuration and no weights and no tokenizer in it: tokens, not
text, go in and come out, and weights come over in memory (`VllmEngine.load`). What differs from the native engine:

- A completion draws by a seed of its own (made of the call's, the prompt's number and the sample's), so a call that is
  repeated gives the same tokens where vLLM's kernels give the same logits, as they do on the CPU.
- Stop sequences of several tokens are looked for when a completion is done: what follows one is cut off.
- On TPUs vLLM takes weights through tpu_inference: see `vllm_tpu.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain.config.reinforcement import LEAST_VLLM_TEMPERATURE, VLLM_MISSING
from maxtext_posttrain.errors import GenerationError, PostTrainError, first_line
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.families import GEMMA2, GEMMA3
from maxtext_posttrain.models.huggingface_config import huggingface_config
from maxtext_posttrain.models.maxtext_config import from_maxtext
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.requests import Request, make_requests
from maxtext_posttrain.rollout.vllm_compat import argument_names, known_patches, patched, supported_arguments
from maxtext_posttrain.rollout.vllm_settings import VllmSettings, installed_version, quiet_vllm

_CACHE_BLOCK = 128
_MOST_CACHE = 4 << 30
"""Bytes; sequences that do not fit wait for others to end."""
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
"""What is set where the user's environment does not: nothing is sent out."""
_CPU_ENVIRONMENT = {
  "VLLM_CPU_OMP_THREADS_BIND": "nobind",
  "TORCH_COMPILE_DISABLE": "1",
  "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""On the CPU: vLLM's threads are bound to no core, and nothing is compiled, for which it would need a C++ compiler."""


class VllmEngine:
  """Generates with vLLM.

  Attributes:
    max_context: tokens of a prompt and its completion together, at most.
    max_batch: sequences generated at once, at most.
    vocab_size: of the model.
    version: vLLM's.
  """

  def __init__(
    self,
    config: MaxTextConfig,
    *,
    settings: VllmSettings,
    platform: str = "cpu",
    max_context: int | None = None,
    max_batch: int = 64,
    filters: bool = True,
    report: Callable[[str], None] = print,
  ):
    """Starts vLLM; its weights are random until `load`.

    Args:
      config: the model's.
      settings: how vLLM is set up.
      platform: of the devices that the model lies on.
      max_context: tokens of a prompt and its completion together; `max_target_length` where not given.
      max_batch: sequences generated at once, at most, unless `settings` say how many.
      filters: calls may ask for top-k and top-p; takes vLLM's older model runner, whose sampler can be told to give
        log-probabilities from before them.
      report: is told what was dropped of vLLM's arguments.

    Raises:
      ConfigError: an argument that the user set is none of this vLLM's.
      GenerationError: vLLM is not installed, does not start, or has no such model.
      ModelError: the architecture has no HuggingFace form.
    """
    version = installed_version()
    if version is None:
      raise GenerationError(f"rollout_engine=vllm: {VLLM_MISSING}")
    self.version = version
    self.max_context = config.max_target_length if max_context is None else max_context
    self.max_batch = settings.arguments.get("max_num_seqs", max_batch)
    self.vocab_size = config.vocab_size
    self._config = config
    self._platform = platform
    self._filters = filters
    self._dead: str | None = None
    architecture = from_maxtext(config)
    # MaxText rounds a tied table to bfloat16 where it is the head. And vLLM's CPU kernels keep a packed copy of the
    # head, which new weights of a tied table do not reach (0.31). Its Gemma classes have no head of their own.
    tied = architecture.dimensions.tied and architecture.family not in (GEMMA2, GEMMA3)
    self._copy_head = tied and (platform == "cpu" or (platform != "tpu" and self.exact))
    self._folder = Path(tempfile.mkdtemp(prefix="vllm-model-"))
    try:
      self._write_folder(architecture)
      self._llm = self._start(architecture, settings, report)
    except BaseException:
      self.close()
      raise

  @property
  def _dtype(self) -> str:
    return "float32" if jnp.dtype(self._config.dtype) == jnp.float32 else "bfloat16"

  @property
  def exact(self) -> bool:
    """Whether it computes in float32."""
    return self._dtype == "float32"

  def _write_folder(self, architecture: Architecture) -> None:
    """The model's folder: a config.json and nothing else."""
    config = huggingface_config(architecture, dtype=self._dtype)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], self.max_context)
    config["tie_word_embeddings"] = architecture.dimensions.tied and not self._copy_head
    (self._folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

  def _start(self, architecture: Architecture, settings: VllmSettings, report: Callable[[str], None]) -> Any:
    _set_environment(settings.show_log, on_cpu=self._platform == "cpu")
    sampler: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    try:
      if self._filters:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        from maxtext_posttrain.rollout import vllm_logits

        sampler = {"logprobs_mode": vllm_logits.MODE, "logits_processors": list(vllm_logits.PROCESSORS)}
      from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
    except Exception as error:
      raise GenerationError(f"vLLM {self.version} can't be imported: {first_line(error)}") from error
    if self._platform == "cpu":
      self._check_head(architecture.dimensions.head)
    own = {**self._own_arguments(architecture), **sampler, "trust_remote_code": settings.trust_remote_code}
    wanted = {**own, **settings.arguments}
    arguments, dropped = supported_arguments(wanted, argument_names(EngineArgs), settings.set_by, self.version)
    if dropped:
      listed = ", ".join(f"{name}={value!r}" for name, value in dropped.items())
      report(f"vLLM {self.version} has no engine argument for {listed}: left out")
    try:
      with patched(known_patches()) as applied, _output_with_a_number():
        for name in applied:
          report(f"vLLM {self.version}: {name} is patched while it starts")
        return self._launch(arguments, architecture)
    except PostTrainError:
      raise
    except Exception as error:
      raise GenerationError(
        f"vLLM {self.version} does not start: {first_line(error)} (maxtext_log=true shows its log)"
      ) from error

  def _launch(self, arguments: Mapping[str, Any], architecture: Architecture) -> Any:
    """Starts vLLM, set up and patched; returns its `LLM`."""
    del architecture  # The model's folder says it.
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(**arguments)

  def _own_arguments(self, architecture: Architecture) -> dict[str, Any]:
    """What the engine asks of vLLM where settings do not."""
    own: dict[str, Any] = {
      "model": str(self._folder),
      "skip_tokenizer_init": True,
      "generation_config": "vllm",
      "load_format": "dummy",
      "dtype": self._dtype,
      "max_model_len": self.max_context,
      "enforce_eager": True,
      "max_num_seqs": self.max_batch,
      "disable_log_stats": True,
    }
    if self._platform == "cpu":
      # Else vLLM takes a share of all memory.
      size = 4 if self.exact else 2
      own["kv_cache_memory_bytes"] = _cache_bytes(architecture, self.max_context, self.max_batch, size)
    return own

  def _check_head(self, size: int) -> None:
    """Refuses heads that vLLM's attention would only refuse amid the first batch."""
    sizes: list[int] = []
    with contextlib.suppress(ImportError, AttributeError):
      from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore[reportMissingImports]

      sizes = CPUAttentionBackend.get_supported_head_sizes()
    if sizes and size not in sizes:
      raise GenerationError(
        f"head_dim={size}: vLLM {self.version} on the CPU takes heads of {', '.join(map(str, sizes))}; set"
        " rollout_engine=native, or make a model with other heads"
      )

  def load(self, weights: nnx.State) -> None:
    """Takes the weights of the next calls, and forgets what was computed with others.

    Args:
      weights: of the model the engine was made for.

    Raises:
      GenerationError: vLLM does not take them.
    """
    self._alive()
    try:
      self._take(weights)
      self._forget()
    except PostTrainError:
      raise
    except Exception as error:
      raise self._died(f"does not take the weights: {first_line(error)}") from error

  def _take(self, weights: nnx.State) -> None:
    from maxtext_posttrain.rollout.vllm_weights import torch_weights

    stream = torch_weights(weights, self._config, copy_head=self._copy_head)
    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})

  def generate(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> list[Completion]:
    """Completes each prompt `options.n` times, with log-probabilities at the temperature that is sampled at.

    Args:
      prompts: token ids, at least one each.
      options: how tokens are chosen.

    Returns:
      The completions of the first prompt, then those of the second, and so on.

    Raises:
      GenerationError: a prompt or an option is none that vLLM takes, or vLLM stopped before all was written.
    """
    self._alive()
    if 0 < options.temperature < LEAST_VLLM_TEMPERATURE:
      raise GenerationError(f"temperature is {options.temperature}: vLLM takes 0 or at least {LEAST_VLLM_TEMPERATURE}")
    if not options.tempered_log_probs and options.temperature not in (0.0, 1.0):
      raise GenerationError("vLLM gives log-probabilities at the temperature it samples at; ask for tempered_log_probs")
    if (options.top_k > 0 or options.top_p < 1) and not self._filters:
      raise GenerationError("this vLLM engine was made for sampling without top-k and top-p; make one with filters")
    requests = make_requests(prompts, options, vocab_size=self.vocab_size, max_context=self.max_context)
    try:
      # What an earlier call left in the cache would be read again, computed in other batches than this one.
      self._forget()
      answers = self._llm.generate(
        [{"prompt_token_ids": request.tokens.tolist()} for request in requests],
        [self._sampling(request, options) for request in requests],
        use_tqdm=False,
      )
    except Exception as error:
      raise self._died(f"stopped amid a batch of {len(requests)} completions: {first_line(error)}") from error
    if len(answers) != len(requests):
      raise self._died(f"gave {len(answers)} of {len(requests)} completions")
    return [self._completion(number, answer, options) for number, answer in enumerate(answers)]

  def _sampling(self, request: Request, options: SamplingOptions) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    return SamplingParams(
      temperature=float(options.temperature),
      top_k=options.top_k,
      top_p=float(options.top_p),
      seed=self._seed(request, options),
      max_tokens=request.budget,
      stop_token_ids=[sequence[0] for sequence in options.stops if len(sequence) == 1],
      ignore_eos=True,
      logprobs=0,
      detokenize=False,
    )

  def _seed(self, request: Request, options: SamplingOptions) -> int | None:
    return None if options.temperature == 0 else request_seed(options.seed, request.prompt, request.sample)

  def _completion(self, number: int, answer: Any, options: SamplingOptions) -> Completion:
    said = answer.outputs[0]
    tokens = list(said.token_ids)
    if said.finish_reason not in ("stop", "length") or len(said.logprobs or ()) != len(tokens):
      raise self._died(f"gave up completion {number} (it says {said.finish_reason})")
    log_probs = [float(place[token].logprob) for place, token in zip(said.logprobs, tokens, strict=True)]
    end = first_stop(tokens, [sequence for sequence in options.stops if len(sequence) > 1])
    if end is not None:
      return Completion(tokens[:end], log_probs[:end], "stop")
    return Completion(tokens, log_probs, said.finish_reason)

  def _forget(self) -> None:
    if self._llm.reset_prefix_cache() is False:
      raise RuntimeError("its prefix cache is in use")

  def _alive(self) -> None:
    if self._dead is not None:
      raise GenerationError(self._dead)

  def _died(self, how: str) -> GenerationError:
    """The error of an engine that is not used again."""
    self._dead = f"vLLM {self.version} {how}; start the run again to go on from its last checkpoint"
    return GenerationError(self._dead)

  def close(self) -> None:
    """Ends vLLM and removes the model's folder; safe to call again."""
    llm = self.__dict__.pop("_llm", None)
    self._dead = self._dead or f"vLLM {self.version} was closed"
    if llm is not None:
      with contextlib.suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    shutil.rmtree(self._folder, ignore_errors=True)


def request_seed(seed: int, prompt: int, sample: int) -> int:
  """A seed for one completion, in [0, 2**63), of the call's seed and the completion's place."""
  digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") >> 1


def first_stop(tokens: Sequence[int], sequences: Sequence[Sequence[int]]) -> int | None:
  """How many tokens there are up to the end of the first of `sequences`; None where none of them is there."""
  for end in range(1, len(tokens) + 1):
    if any(tuple(tokens[max(0, end - len(sequence)) : end]) == tuple(sequence) for sequence in sequences):
      return end
  return None


def _cache_bytes(architecture: Architecture, max_context: int, max_batch: int, size: int) -> int:
  """Room for the keys and values of the sequences that are generated at once, in whole blocks."""
  dimensions = architecture.dimensions
  block = _CACHE_BLOCK * dimensions.layers * 2 * dimensions.kv_heads * dimensions.head * size
  sequence = -(-max_context // _CACHE_BLOCK) * block
  # One block is vLLM's own.
  return block + min(max_batch * sequence, max(sequence, _MOST_CACHE))


def _set_environment(show_log: bool, *, on_cpu: bool) -> None:
  """Sets what vLLM reads of the environment when it is imported."""
  # In this process: weights come over as they are, and no second copy of them is held elsewhere.
  os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
  for name, value in {**_ENVIRONMENT, **(_CPU_ENVIRONMENT if on_cpu else {})}.items():
    os.environ.setdefault(name, value)
  if not show_log:
    quiet_vllm()


@contextlib.contextmanager
def _output_with_a_number() -> Iterator[None]:
  """Puts the process's own standard output in the place of one that is no file, as a notebook's; vLLM asks for it."""
  try:
    sys.stdout.fileno()
    usable = True
  except (AttributeError, OSError, ValueError):
    usable = sys.__stdout__ is None
  with contextlib.nullcontext() if usable else contextlib.redirect_stdout(sys.__stdout__):
    yield
