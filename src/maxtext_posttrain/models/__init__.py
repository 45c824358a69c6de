"""Models on disk: where their weights and their configuration lie, and a live model of the two."""
