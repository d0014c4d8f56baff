"""What commands take of a run folder."""

import dataclasses

from scalejax import configs
from scalejax.cli import folders


def test_the_record_of_a_run_does_not_choose_where_caches_lie():
    data = dataclasses.replace(configs.load("llama-smoke", []).data, folder="/planted")

    @dataclasses.dataclass(frozen=True)
    class Theirs:
        parts: tuple[object, ...]
        folder: str = "what they read"

    assert folders._with_own_caches(data) == dataclasses.replace(data, folder=None)
    assert folders._with_own_caches(Theirs((data,))) == Theirs((dataclasses.replace(data, folder=None),))
