"""Settings of hypothesis for tests that draw the same examples in each run."""

from hypothesis import HealthCheck, Phase, settings


def the_same_draws(count):
    """Return settings for this number of examples."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # report the failing example as drawn; shrinking it takes long
    )
