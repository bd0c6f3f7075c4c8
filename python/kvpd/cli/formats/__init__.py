"""``kvpd formats``: the known page formats, and where each element goes."""
