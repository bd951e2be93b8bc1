import os

from hypothesis import HealthCheck, settings

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=120, **common)
settings.register_profile("explore", max_examples=1000, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
