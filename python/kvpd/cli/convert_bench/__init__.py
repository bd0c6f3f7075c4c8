"""The parts of ``kvpd bench convert``."""
