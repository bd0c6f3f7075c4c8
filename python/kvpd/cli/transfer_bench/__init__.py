"""``kvpd bench transfer``: two processes, every way to move the same pages, in one run."""
