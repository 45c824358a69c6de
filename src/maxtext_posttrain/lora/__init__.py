"""Adapters on disk: what they were trained over, how they are merged into full weights, and PEFT's files of them."""
