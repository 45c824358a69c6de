"""Losses: arrays in, arrays out."""
