"""Models on disk: where their weights and configuration lie, a live model of the two, and others' formats in and out."""
