"""MoE experts for many tokens: grouped GEMMs of the tokens' rows, which are sorted by expert."""
