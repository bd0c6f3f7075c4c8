"""Checks that need a GPU; none is collected unless named."""
