import os

from hypothesis import HealthCheck, settings

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", common, derandomize=True, max_examples=120)
settings.register_profile("explore", common, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
