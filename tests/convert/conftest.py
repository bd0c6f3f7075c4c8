"""The interpreter is chosen before any test of this folder imports the kernels."""

from tests.convert import interpreter  # noqa: F401
