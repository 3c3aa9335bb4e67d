"""Cached contexts: prefixes that are computed once and kept in the pool until their time is over (docs/caching.md)."""
