"""Speculative decoding: trees of draft tokens, and which of them the target model accepts."""
