"""Oracles: written from the shapes that vLLM and AITER document, without any of kvpd's code."""
