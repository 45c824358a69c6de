"""What a model is worth on data: likelihood of its tokens, and answers to questions in mathematics."""
