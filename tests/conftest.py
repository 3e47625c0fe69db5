"""How every test draws: the same examples in every run; `--hypothesis-profile=long` draws new and more ones."""

from hypothesis import settings

settings.register_profile("quick", max_examples=15, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=150, deadline=None, print_blob=True, database=None)
settings.load_profile("quick")
