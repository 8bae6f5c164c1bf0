"""`mokfx bench`: times one MoE layer, variants side by side in one run, each checked before it is timed."""
