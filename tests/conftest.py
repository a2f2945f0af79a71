"""Settings every test runs under.

The `ci` profile makes Hypothesis repeatable and without deadlines, so that a failure comes from the change at hand and
not from luck or a busy machine. It is the default; `pytest --hypothesis-profile=explore` searches wider, at random.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("ci")
