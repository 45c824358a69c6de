"""The trainers and the base they share."""
