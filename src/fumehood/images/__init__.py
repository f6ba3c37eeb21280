"""Small images of Python for tiers that bring their own root: built from Debian packages, kept here or in an engine."""
