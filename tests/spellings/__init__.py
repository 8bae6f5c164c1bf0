"""Ordinary MoE layers, written the many ways that people write them. Only torch is used here."""
