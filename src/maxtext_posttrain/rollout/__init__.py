"""Generation: token ids in, token ids and their log-probabilities out."""
