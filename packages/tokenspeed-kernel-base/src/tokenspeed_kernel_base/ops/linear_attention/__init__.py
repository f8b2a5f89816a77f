"""Linear attention with gates and the delta rule: gated delta networks (GDN) and Kimi Delta Attention (KDA)."""
