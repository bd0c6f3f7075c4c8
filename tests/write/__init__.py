"""Tests of `kvpd.write`."""
