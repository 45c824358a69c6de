"""Post-training for MaxText whose checkpoints pre-training resumes from as they are."""

__version__ = "0.1.0"
