"""Linear attention with the gated delta rule: gated delta networks (GDN) and Kimi Delta Attention (KDA)."""
