"""Tokenizers and chat templates: SentencePiece, tiktoken and HuggingFace behind one interface."""

from maxtext_posttrain.tokenizers.base import RenderedConversation, TokenId, Tokenizer
from maxtext_posttrain.tokenizers.chat_template import builtin_names
from maxtext_posttrain.tokenizers.factory import build_tokenizer, configured_tokenizer

__all__ = ["RenderedConversation", "TokenId", "Tokenizer", "build_tokenizer", "builtin_names", "configured_tokenizer"]
