"""The tiny HuggingFace models in tests/data/families, made by scripts/make_family_references.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.huggingface_config import from_huggingface
from maxtext_posttrain.models.safetensors_files import SafetensorsFolder

FOLDER = Path(__file__).resolve().parents[1] / "data" / "families"
NAMES = ("gemma2", "gemma3", "llama2", "llama3_1", "llama3_2", "mistral", "qwen2_5", "qwen3", "smollm2")
LENGTHS = (1, 7, 40)
PROMPT_LENGTHS = (2, 9, 20)


def config(name: str) -> dict[str, Any]:
  return json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))


def architecture(name: str) -> Architecture:
  return from_huggingface(config(name))


def tensors(name: str) -> dict[str, np.ndarray]:
  folder = SafetensorsFolder(FOLDER / name)
  return {tensor: folder.read(tensor) for tensor in folder.shapes()}


def logits(name: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
  """Length to tokens [1, length] and transformers' logits [1, length, vocab]."""
  with np.load(FOLDER / name / "logits.npz") as arrays:
    return {length: (arrays[f"tokens_{length}"], arrays[f"logits_{length}"]) for length in LENGTHS}


def greedy(name: str) -> tuple[list[list[int]], list[list[int]]]:
  """Prompts, and the tokens that transformers' greedy decoding adds to each."""
  with np.load(FOLDER / name / "greedy.npz") as arrays:
    return tuple([arrays[f"{kind}_{length}"].tolist() for length in PROMPT_LENGTHS] for kind in ("prompt", "tokens"))
