"""Rewards: named, pure functions of (prompt, completion, answer), each called in a process of its own."""
