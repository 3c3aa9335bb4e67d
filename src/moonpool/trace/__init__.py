"""Request traces: read, write, describe, and replay against a pool's eviction policies (PAPER §2, §8)."""
