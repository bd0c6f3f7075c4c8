"""The interpreter is chosen before any test of this folder imports triton."""

from tests.write import interpreter  # noqa: F401
