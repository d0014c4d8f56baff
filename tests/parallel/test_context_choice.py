"""pass-KV or pass-Q: what the paper's formulas decide of its own table, and lines fitted to measurements."""

import math

import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.parallel import context_choice
from scalejax.parallel.context_choice import ContextCosts, FittedChoice, Measurement, by_message, by_message_and_return

LLAMA_405B = ContextCosts(ranks=4, heads=128, kv_heads=8, element_bytes=2, flops_per_s=800e12, bytes_per_s=50e9)

TABLE_4 = {
    1_280: (1023.39, 898.71), 3_200: (1110.18, 1046.43), 4_160: (1298.92, 1280.1), 6_400: (1305.56, 1302.01),
    12_800: (2080.67, 2205.27), 25_600: (3353.02, 3617.02), 38_400: (4629.23, 4922.52), 51_200: (5745.08, 6217.83),
    64_000: (6845.21, 7367.99), 76_800: (7890.35, 8468.66), 89_600: (8697.27, 9666.62), 102_400: (10105.78, 10652.39),
    115_200: (11136.4, 11571.62), 128_000: (11462.15, 12360.57),
}  # fmt: skip
"""New tokens of 128,000: milliseconds of pass-KV and pass-Q, Llama 3 405B on 4 x 8 H100 (arXiv 2411.01783, table 4)."""

MEASURED = [
    Measurement(new=new, cached=128_000 - new, pass_kv_s=kv / 1e3, pass_q_s=q / 1e3) for new, (kv, q) in TABLE_4.items()
]
PUBLISHED = FittedChoice(log_new=-1.059, log_miss_rate=1.145, constant=12.112, pass_kv_from=math.inf)


def wrong(choose):
    return [m.new for m in MEASURED if choose(m.new, m.cached) != m.faster]


def test_thresholds_of_the_paper_s_machine():
    assert LLAMA_405B.hidden_from == 4_000
    assert LLAMA_405B.queries_hidden_from == 32_000
    assert LLAMA_405B.equal_messages_at == 0.125


def test_algorithm_1_agrees_with_12_of_14_rows():
    assert wrong(lambda *row: by_message(LLAMA_405B, *row)) == [4_160, 6_400]


def test_algorithm_5_is_strict_at_3200_new_tokens_where_the_paper_is_at_equality():
    assert wrong(lambda *row: by_message_and_return(LLAMA_405B, *row)) == [4_160, 6_400]
    assert by_message_and_return(LLAMA_405B, 3_200, 124_800) == "pass_q"
    assert by_message_and_return(LLAMA_405B, 3_201, 124_800) == "pass_kv"
    assert by_message(LLAMA_405B, 3_201, 124_800) == "pass_q"  # which sees no all-to-all


def test_the_published_line_chooses_pass_q_for_every_row():
    assert {PUBLISHED.choose(m.new, m.cached) for m in MEASURED} == {"pass_q"}
    late = [m for m in MEASURED if m.new >= 12_800]
    losses = [m.pass_q_s / m.pass_kv_s - 1 for m in late]
    assert wrong(PUBLISHED.choose) == [m.new for m in late]
    assert min(losses) > 0.035
    assert 0.11 < max(losses) < 0.12


@pytest.mark.parametrize(("new", "cached", "want"), [(4_000, 10**6, "pass_kv"), (3_999, 10**6, "pass_q"),
                                                     (1, 0, "pass_kv"), (1, 7, "pass_kv"), (1, 8, "pass_q"),
                                                     (1, 128_000, "pass_q")])  # fmt: skip
def test_edges_of_algorithm_1(new, cached, want):
    """T = T*, a full prefill, m = 2 K / H exactly, a decode."""
    assert by_message(LLAMA_405B, new, cached) == want


def test_algorithm_1_never_goes_back_to_pass_q_as_a_prompt_grows_at_a_fixed_miss_rate():
    for times in (0, 3, 7, 8, 50, 1_000):
        chosen = [by_message(LLAMA_405B, new, new * times) for new in range(1, 6_000, 7)]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[-1] == "pass_kv"


def grid(ratio):
    """Measurements whose pass-Q takes e^ratio(T, m) times as long."""
    return [
        Measurement(new=t, cached=p, pass_kv_s=1e-3 * t, pass_q_s=1e-3 * t * math.exp(ratio(t, t / (t + p))))
        for t in (16, 64, 256, 1_024, 4_096)
        for p in (0, 512, 4_096, 32_768)
    ]


def test_a_planted_line_is_found_and_decides_every_row():
    found = context_choice.calibrate(grid(lambda t, m: 0.3 * math.log(t) + 0.2 * math.log(m) - 1.1))
    choice = found.choice
    np.testing.assert_allclose((choice.log_new, choice.log_miss_rate, choice.constant), (0.3, 0.2, -1.1), atol=1e-12)
    assert (found.right, found.measured, found.lost) == (20, 20, 0)
    assert choice.choose(16, 32_768) == "pass_q"
    assert choice.choose(4_096, 0) == "pass_kv"


def test_noise_moves_it_little():
    rng = np.random.default_rng(0)
    noisy = grid(lambda t, m: 0.3 * math.log(t) + 0.2 * math.log(m) - 1.1 + 0.02 * rng.normal())
    found = context_choice.calibrate(noisy)
    assert found.right >= 19
    assert found.lost < 0.01
    assert abs(found.choice.log_new - 0.3) < 0.02


def test_above_the_guard_it_is_pass_kv_whatever_the_line_says():
    rows = grid(lambda t, m: 0.4 if t >= 1_024 else -0.2)
    assert context_choice.calibrate(rows).choice.pass_kv_from == 1_024
    assert context_choice.calibrate(rows, pass_kv_from=300).choice.choose(300, 10**9) == "pass_kv"
    assert context_choice.calibrate(grid(lambda t, m: -0.1)).choice.pass_kv_from == math.inf
    assert context_choice.calibrate(grid(lambda t, m: 0.1)).choice.pass_kv_from == 16


def test_mistakes_say_what_to_measure_or_pass():
    with pytest.raises(
        UserError, match=r"the 14 measurements must differ in new tokens and, at equal .* Measure a grid"
    ):
        context_choice.calibrate(MEASURED)  # m follows from T where T + P is fixed
    with pytest.raises(UserError, match="seconds must be numbers above 0"):
        context_choice.calibrate([Measurement(new=1, cached=1, pass_kv_s=0, pass_q_s=1)])
    with pytest.raises(UserError, match="new tokens must be at least 1; got 0"):
        by_message(LLAMA_405B, 0, 5)
    with pytest.raises(UserError, match="ContextCosts: bytes_per_s must be a number above 0; got 0"):
        ContextCosts(ranks=4, heads=8, kv_heads=8, element_bytes=2, flops_per_s=1, bytes_per_s=0)
