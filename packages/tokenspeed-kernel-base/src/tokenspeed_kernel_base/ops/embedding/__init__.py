"""Position embedding (RoPE)."""
