"""``kvpd inspect``: what a running engine offers."""
