"""``pytest --pyargs fumehood.attacks``: the suite against the default jail."""

from fumehood.attacks.testing import *  # noqa: F403
