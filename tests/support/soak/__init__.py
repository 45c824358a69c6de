"""The soak: kills, faults of the disk, mutated input and random conversations, by the thousands (`make soak`)."""
