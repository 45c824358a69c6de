"""Models on disk: where weights and configuration lie, a live model of the two, other formats in and out."""
