"""Checkpoints that MaxText's pre-training resumes from as they are."""
