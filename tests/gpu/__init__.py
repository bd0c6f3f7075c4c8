"""Checks that need a GPU, check_*.py and serve.py, are run by name; test_*.py try their parts."""
