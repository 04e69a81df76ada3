"""What all tests share: how long one example takes says nothing on a machine that others use, too."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
