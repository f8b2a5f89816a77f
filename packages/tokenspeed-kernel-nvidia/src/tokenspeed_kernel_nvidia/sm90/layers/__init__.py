"""The layers of a decode step of few tokens, in one persistent launch."""
