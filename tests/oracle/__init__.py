"""Oracles: written from the shapes in vLLM's and AITER's own documentation, without any of kvpd's code."""
