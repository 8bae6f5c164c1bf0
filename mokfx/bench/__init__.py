"""`python -m mokfx.bench`: times one MoE layer's forward, variants side by side in one run."""
