"""Weights of known families in and out: HuggingFace folders and GGUF files to MaxText's items, and back."""
