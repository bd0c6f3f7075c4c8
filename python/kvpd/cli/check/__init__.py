"""``kvpd check``: whether a prefill and a decoder will pair."""
