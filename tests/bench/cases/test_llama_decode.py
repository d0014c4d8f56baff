"""The figures of the benchmark of generation, on a clock that the engine turns."""

import types

import numpy as np
import pytest

from scalejax.bench.cases import llama_decode


class Engine:
    """Takes 0.5 s for prompts and 2 ms for every token, the second time, and much more the first."""

    def __init__(self, params):
        self.params = {name: np.zeros(count, np.float32) for name, count in params.items()}
        self.now, self.seen = 0.0, set()

    def generate(self, prompts, max_tokens):
        self.now += 0.5 + 2e-3 * max_tokens + (0 if max_tokens in self.seen else 10)
        self.seen.add(max_tokens)


@pytest.mark.parametrize(
    ("params", "read"),
    [
        ({"embed/weight": 1000, "head/weight": 2_500, "layers/w": 2_500}, 20_000),  # rows of a table are looked up
        ({"embed/weight": 2_500, "layers/w": 2_500}, 20_000),  # a table that is the head, too, is read whole
    ],
)
def test_a_step_is_what_one_more_token_takes_and_reads_all_parameters_but_looked_up_rows(monkeypatch, params, read):
    engine = Engine(params)
    monkeypatch.setattr(llama_decode, "time", types.SimpleNamespace(perf_counter=lambda: engine.now))
    monkeypatch.setattr(llama_decode, "_copy_bytes_per_s", lambda: 4e7)
    assert llama_decode._figures(engine, [[1, 2, 3]]) == pytest.approx(
        {
            "ms_a_step": 2.0,
            "read_gb_per_s": read / 2e-3 / 1e9,
            "copy_gb_per_s": 0.04,
            "share_of_copy": 0.25,
        }
    )
