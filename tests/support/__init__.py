"""Helpers of the tests: looks at the host from outside."""
