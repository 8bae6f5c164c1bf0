"""Tests of the compiler pass."""
