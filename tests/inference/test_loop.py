"""The loop: many sequences at once have the tokens that each has alone, and what is shared is read once."""

import dataclasses

import fake_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import GQA, MISTRAL, tokens, write_checkpoint

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.inference import generate, loop, programs
from scalejax.inference.requests import Request
from scalejax.inference.sampling import TokenSampling
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape

IDS = tokens(GQA, 1, 400)[0].tolist()
LONG = dataclasses.replace(GQA, max_positions=256)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "theirs"
    write_checkpoint(folder, LONG)
    return generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))


def scheduler(engine, units, *, slots=4, page=16, **more):
    return loop.make_loop(engine, slots=slots, kv_tokens=units * page, page=page, **more)


def run(on, until=None):
    """{(request, sample): (tokens, ended)} of everything that is submitted, and the chunks of each step."""
    found, steps = {}, []
    while on.busy and (until is None or len(steps) < until):
        chunks = on.step()
        steps.append(chunks)
        for chunk in chunks:
            before = found.get((chunk.request, chunk.sample), ((), None))
            found[chunk.request, chunk.sample] = (before[0] + chunk.tokens, chunk.ended)
    return found, steps


def greedy(engine, prompt, count):
    """By full passes, a token at a time."""
    ids = list(prompt)
    for _ in range(count):
        row = np.zeros((1, 256), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(np.argmax(engine.logits(row)[0, len(ids) - 1])))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("window", [None, 40])
def test_pages_hold_what_every_sequence_of_a_mixed_load_has_to_see(window):
    draw = np.random.default_rng(0)
    on = fake_programs.scheduler(units=24, slots=4, window=window)
    common, want = draw.integers(0, 9, 60).tolist(), {}
    found = {}
    for _ in range(16):
        prompt = (*common[: draw.integers(61)], *draw.integers(0, 9, draw.integers(1, 90)).tolist())
        count, chosen = int(draw.integers(1, 90)), TokenSampling(temperature=float(draw.integers(2)), seed=5)
        samples = int(draw.integers(1, 4)) if chosen.temperature else 1
        number = on.submit(Request(prompt=prompt, max_tokens=count, sampling=chosen, samples=samples))
        for n in range(samples):
            want[number, n] = (fake_programs.continued(prompt, count, window, chosen, n), "length")
        for key, (new, ended) in run(on, until=int(draw.integers(4)))[0].items():
            found[key] = (found.get(key, ((), None))[0] + new, ended)
    for key, (new, ended) in run(on)[0].items():
        found[key] = (found.get(key, ((), None))[0] + new, ended)
    assert found == want
    assert on.stats.kv_usage == 0
    assert on.stats.prefix_hits > 0
    assert window or on.stats.preemptions > 0


@pytest.mark.parametrize("slots", [8, 3])
def test_samples_go_on_from_the_pages_of_their_prompt(slots):
    on = fake_programs.scheduler(units=64, slots=slots)
    chosen, prompt = TokenSampling(temperature=1.0, seed=3), tuple(IDS[:70])
    on.submit(Request(prompt=prompt, max_tokens=8, sampling=chosen, samples=6))
    found, _ = run(on)
    assert [found[0, n][0] for n in range(6)] == [fake_programs.continued(prompt, 8, None, chosen, n) for n in range(6)]
    # Those that find no slot read what is no full page.
    assert on.steps.state.read_tokens <= (70 if slots == 8 else 70 + 3 * 6)


@pytest.mark.slow
def test_sequences_of_all_lengths_that_come_at_any_time_are_those_of_full_passes(engine):
    prompts = [IDS[a:b] for a, b in ((0, 3), (5, 45), (50, 190), (200, 217), (220, 221), (230, 250), (260, 300))]
    lengths = (20, 5, 12, 1, 17, 33, 8)
    on = scheduler(engine, 64, slots=3)
    numbers, found = {}, {}
    for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        numbers[place] = on.submit(Request(prompt=tuple(prompt), max_tokens=length))
        part, _ = run(on, until=2)
        for key, (new, ended) in part.items():
            found[key] = (found.get(key, ((), None))[0] + new, ended)
    for key, (new, ended) in run(on)[0].items():
        found[key] = (found.get(key, ((), None))[0] + new, ended)
    for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert found[numbers[place], 0] == (greedy(engine, prompt, length), "length"), place
    assert on.stats.running == on.stats.waiting == 0
    assert on.stats.kv_usage == 0
    assert on.stats.generation_tokens == sum(lengths)
    assert on.stats.prompt_tokens == sum(map(len, prompts))


@pytest.mark.slow
def test_who_comes_late_has_a_token_before_the_long_one_ends(engine, monkeypatch):
    monkeypatch.setattr(loop, "PIECE", 32)
    monkeypatch.setattr(loop, "LENGTHS", (32,))
    on = scheduler(engine, 64)
    first = on.submit(Request(prompt=tuple(IDS[:20]), max_tokens=150))
    run(on, until=2)
    second = on.submit(Request(prompt=tuple(IDS[30:180]), max_tokens=3))
    _, steps = run(on)
    where = {number: [at for at, step in enumerate(steps) if any(c.request == number and c.tokens for c in step)]
             for number in (first, second)}  # fmt: skip
    assert where[second][0] < where[first][-1]
    # While a prompt is read, and after it again in blocks.
    sizes = [len(c.tokens) for step in steps for c in step if c.request == first]
    assert sizes[0] == 1
    assert max(sizes) == programs.BLOCK


@pytest.mark.slow
def test_logits_are_to_the_bit_those_of_a_run_alone(engine):
    """In the same buckets: the neighbours, the slot and the pages are others."""

    def logits(on, place):
        state = on.steps.state.logits
        return np.asarray(state[place])

    def alone():
        on = scheduler(engine, 64)
        on.submit(Request(prompt=tuple(IDS[100:130]), max_tokens=9))
        run(on)
        return logits(on, 0)

    on = scheduler(engine, 64)
    for a in (3, 40):
        on.submit(Request(prompt=tuple(IDS[a : a + 9]), max_tokens=40))
    run(on, until=1)
    on.submit(Request(prompt=tuple(IDS[100:130]), max_tokens=9))
    slot = []
    while on.busy:
        on.step()
        slot += [one.slot for one in on._running if one.number == 2]
    assert set(slot) == {2}
    np.testing.assert_array_equal(logits(on, 2), alone())


@pytest.mark.slow
def test_a_common_beginning_is_read_once(engine):
    on = scheduler(engine, 64)
    shared = tuple(IDS[:100])
    alone = [run_alone(engine, (*shared, *tail)) for tail in (IDS[200:207], IDS[300:301])]
    on.submit(Request(prompt=(*shared, *IDS[200:207]), max_tokens=8))
    first, _ = run(on)
    read = on.stats.prompt_tokens
    assert read == 107
    on.submit(Request(prompt=(*shared, IDS[300]), max_tokens=8))
    second, steps = run(on)
    assert [first[0, 0][0], second[1, 0][0]] == alone
    assert on.stats.prompt_tokens - read == 101 - 96
    assert (on.stats.prefix_hits, on.stats.prefix_queries) == (96, 208)
    assert {c.reused for step in steps for c in step} == {96}


def run_alone(engine, prompt, count=8, **more):
    return engine.generate([prompt], max_tokens=count, **more)[0].tokens


@pytest.mark.slow
def test_turns_of_a_conversation_read_what_is_new(engine):
    on, said = scheduler(engine, 16, slots=1), []
    for turn in range(4):
        said += IDS[40 * turn : 40 * turn + 7]
        read = on.stats.prompt_tokens
        (got,) = engine.generate([said], max_tokens=11, loop=on)
        assert got.tokens == greedy(engine, said, 11)
        assert on.stats.prompt_tokens - read == 7
        assert got.reused == len(said) - 7
        said += got.tokens


@pytest.mark.slow
def test_samples_read_their_prompt_once_and_draw_as_if_alone(engine):
    chosen = TokenSampling(temperature=1.0, seed=3)
    prompt = tuple(IDS[:70])
    want = [run_alone(engine, prompt, sampling=chosen, samples=[n]) for n in range(6)]
    assert len(set(want)) == 6
    for slots in (8, 3):  # of which some have to wait for a slot
        on = scheduler(engine, 64, slots=slots)
        on.submit(Request(prompt=prompt, max_tokens=8, sampling=chosen, samples=6))
        found, _ = run(on)
        assert [found[0, n][0] for n in range(6)] == want
        most = 70 if slots == 8 else 70 + 3 * 6
        assert on.stats.prompt_tokens <= most


@pytest.mark.slow
def test_eight_samples_of_512_tokens_read_them_once(tmp_path, monkeypatch):
    config = dataclasses.replace(GQA, max_positions=1024)
    write_checkpoint(tmp_path / "theirs", config)
    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    longer = generate.load(model_folder.open_folder(tmp_path / "theirs"), mesh)
    on, read = loop.make_loop(longer, slots=8, kv_tokens=2048), []
    whole = on._programs.read

    def spied(params, rows, reading, *more):
        read.append(int((reading.positions >= 0).sum()))
        return whole(params, rows, reading, *more)

    spied._cache_size = whole._cache_size
    monkeypatch.setitem(vars(on._programs), "read", spied)
    prompt = tuple(tokens(config, 1, 512)[0].tolist())
    on.submit(Request(prompt=prompt, max_tokens=40, samples=8, sampling=TokenSampling(temperature=1.0, seed=3)))
    on.step()
    assert (read, on.stats.prompt_tokens, on.stats.running) == ([512], 512, 8)
    assert (on.stats.prefix_queries, on.stats.prefix_hits) == (8 * 512, 7 * 512)
    # 8 units of the prompt for all, and one each for what is new.
    assert round(on.stats.kv_usage * 2048 / 64) <= 8 + 8
    found, _ = run(on)
    assert len({new for new, _ in found.values()}) == 8
    assert read == [512]


@pytest.mark.slow
def test_who_is_put_back_for_want_of_units_has_the_tokens_of_an_undisturbed_run(engine):
    prompts = [tuple(IDS[a : a + 30]) for a in (0, 50, 100)]
    want = [run_alone(engine, prompt, 60) for prompt in prompts]
    on = scheduler(engine, 12)  # 192 tokens, of 270 in the end
    for prompt in prompts:
        on.submit(Request(prompt=prompt, max_tokens=60))
    found, _ = run(on)
    assert [found[n, 0] for n in range(3)] == [(tokens, "length") for tokens in want]
    assert on.stats.preemptions > 0
    assert on.stats.kv_usage == 0


@pytest.mark.slow
def test_a_cancelled_request_frees_its_slot_and_units_at_once(engine):
    on = scheduler(engine, 16, slots=1)
    first = on.submit(Request(prompt=tuple(IDS[:100]), max_tokens=50))
    waiting = on.submit(Request(prompt=tuple(IDS[3:5]), max_tokens=4))
    last = on.submit(Request(prompt=tuple(IDS[200:220]), max_tokens=4))
    on.step()
    on.cancel(first)
    on.cancel(waiting)
    assert on.stats.kv_usage == 0
    found, _ = run(on)
    assert {*found} == {(last, 0)}
    assert found[last, 0][0] == greedy(engine, IDS[200:220], 4)


@pytest.mark.slow
def test_a_cancelled_sample_frees_its_slot_and_the_others_go_on(engine):
    asked = Request(prompt=tuple(IDS[:40]), max_tokens=30, samples=3, sampling=TokenSampling(temperature=1.0, seed=3))
    alone = scheduler(engine, 64, slots=3, block_s=0)
    alone.submit(asked)
    want, _ = run(alone)
    on = scheduler(engine, 64, slots=3, block_s=0)
    number = on.submit(asked)
    on.step()
    later = on.submit(Request(prompt=tuple(IDS[100:110]), max_tokens=2))
    on.step()
    assert (on.stats.running, on.stats.waiting) == (3, 1)
    on.cancel(number, 1)
    assert (on.stats.running, on.stats.waiting) == (2, 1)
    on.step()
    assert (on.stats.running, on.stats.waiting) == (3, 0)  # who waited has its slot
    found, _ = run(on)
    assert (number, 1) not in found
    for sample in (0, 2):
        assert found[number, sample][0] == want[0, sample][0][-len(found[number, sample][0]) :]
    assert found[later, 0][1] == "length"
    assert on.stats.kv_usage == 0


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_full_pass(engine):
    on = scheduler(engine, 64)
    asked = Request(prompt=tuple(IDS[:12]), max_tokens=6, logprobs=3, prompt_logprobs=2)
    on.submit(asked)
    on.submit(Request(prompt=tuple(IDS[50:60]), max_tokens=6))  # which asks for none
    _, steps = run(on)
    chunks = [c for step in steps for c in step if c.request == 0]
    new = [token for c in chunks for token in c.tokens]
    row = jnp.asarray([[*asked.prompt, *new]], jnp.int32)
    want = np.asarray(jax.nn.log_softmax(engine.logits(np.asarray(row))[0]))
    told = [one for c in chunks for one in c.logprobs]
    assert len(told) == 6
    for at, one in enumerate(told):
        np.testing.assert_allclose(one.logprob, want[11 + at, new[at]], atol=1e-4)
        assert [i for i, _ in one.top] == np.argsort(-want[11 + at])[:3].tolist()
        np.testing.assert_allclose([p for _, p in one.top], np.sort(want[11 + at])[::-1][:3], atol=1e-4)
    (of_prompt,) = [c.prompt_logprobs for c in chunks if c.prompt_logprobs]
    assert of_prompt[0] is None
    for at, one in enumerate(of_prompt[1:]):
        assert one.token == asked.prompt[at + 1]
        np.testing.assert_allclose(one.logprob, want[at, one.token], atol=1e-4)
        assert len(one.top) == 2
    assert all(not c.logprobs for step in steps for c in step if c.request == 1)


def test_a_prompt_can_be_scored_alone(engine):
    on = scheduler(engine, 8)
    on.submit(Request(prompt=tuple(IDS[:5]), max_tokens=0, prompt_logprobs=0))
    (chunk,) = on.step()
    assert (chunk.ended, len(chunk.prompt_logprobs), chunk.tokens) == ("length", 5, ())
    assert not on.busy


@pytest.mark.slow
def test_rows_whose_logits_are_not_finite_end_alone_and_leave_nothing_behind(engine):
    """A token whose row of the table is NaN: who reads it ends, others do not, nor who comes after it."""
    table = engine.params["embed/weight"].at[95].set(np.nan)
    broken = dataclasses.replace(engine, params={**engine.params, "embed/weight": table}, choices=95)
    fine = [token for token in IDS if token != 95]
    want = [greedy(broken, fine[a : a + 20], 40) for a in (0, 100)]
    on = scheduler(broken, 12)
    on.submit(Request(prompt=tuple(fine[:20]), max_tokens=40))
    on.submit(Request(prompt=(*fine[50:70], 95, 3), max_tokens=40))
    found, steps = run(on)
    assert found[0, 0] == (want[0], "length")
    assert found[1, 0] == ((), "error")
    assert any("logits are not finite" in c.message for step in steps for c in step)
    for _ in range(4):  # which take all units in turn
        on.submit(Request(prompt=tuple(fine[100:120]), max_tokens=40))
    found, _ = run(on)
    assert [found[number, 0] for number in range(2, 6)] == [(want[1], "length")] * 4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cancelled", "behind a window", "behind a window, int8"])
def test_what_is_not_finite_stays_with_its_request(engine, monkeypatch, case):
    """Also where nobody has seen its logits, where its units were let go of, and where numbers are stored as int8."""
    monkeypatch.setattr(loop, "PIECE", 32)
    monkeypatch.setattr(loop, "LENGTHS", (32,))
    table = engine.params["embed/weight"].at[95].set(np.nan)
    config = dataclasses.replace(engine.config, window=40) if "window" in case else engine.config
    shape = engine.shape
    if config != engine.config:
        shape = ModelShape.of(config.task(TokenSchema(vocabulary=96, length=64)).init(nnx.Rngs(0), nn.Dtypes()))
    broken = dataclasses.replace(
        engine, config=config, shape=shape, params={**engine.params, "embed/weight": table}, choices=95
    )
    fine = [token for token in IDS if token != 95]
    on = scheduler(broken, 14, slots=2, kv_dtype="int8" if "int8" in case else "compute")
    bad = on.submit(Request(prompt=(*fine[:5], 95, *fine[5:120]), max_tokens=4))
    on.step()
    if case == "cancelled":
        on.cancel(bad)
    found, _ = run(on)
    if "int8" in case:
        assert found[bad, 0] == ((), "error")
    for begin in range(0, 160, 40):
        on.submit(Request(prompt=tuple(fine[begin + 100 : begin + 130]), max_tokens=8))
    found, _ = run(on)
    assert [ended for _, ended in found.values()] == ["length"] * 4


def test_a_loop_says_how_long_a_sequence_it_can_hold(engine):
    on = scheduler(engine, 6)
    assert on.max_positions == 96
    on.submit(Request(prompt=tuple(IDS[:90]), max_tokens=6))
    with pytest.raises(UserError, match="the cache has room for 96"):
        on.submit(Request(prompt=tuple(IDS[:90]), max_tokens=7))


@pytest.mark.slow
def test_scores_of_prompts_of_a_length_come_together_and_samples_are_no_requests(engine, monkeypatch):
    monkeypatch.setattr(loop, "SCORED", 64)
    on, warm = scheduler(engine, 64, slots=2, block_s=0), TokenSampling(temperature=1.0)
    prompts = [tuple(IDS[begin : begin + count]) for begin, count in ((0, 9), (1, 40), (2, 12), (3, 5))]
    for prompt in prompts:
        on.submit(Request(prompt=prompt, max_tokens=0, prompt_logprobs=2))
    on.submit(Request(prompt=tuple(IDS[:9]), max_tokens=3, samples=5, sampling=warm))
    chunks = [on.step() for _ in range(3)]
    # Two rows of 32, then the prompt that wants a row of 64, then what is left.
    assert [[chunk.request for chunk in step] for step in chunks] == [[0, 2], [1], [3, 4, 4]]
    for chunk in (chunk for step in chunks for chunk in step if chunk.request < 4):
        prompt = prompts[chunk.request]
        want = np.asarray(jax.nn.log_softmax(engine.logits(np.asarray([prompt]))[0]))
        told = [one.logprob for one in chunk.prompt_logprobs[1:]]
        np.testing.assert_allclose(told, want[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
    assert (on.stats.running, on.stats.waiting) == (2, 0)
    assert len(run(on)[0]) == 5


@pytest.mark.slow
def test_a_stop_token_ends_its_row_and_is_no_part_of_it(engine):
    want = greedy(engine, IDS[:20], 12)
    on = scheduler(engine, 64)
    on.submit(Request(prompt=tuple(IDS[:20]), max_tokens=12, stop=(want[5],)))
    on.submit(Request(prompt=tuple(IDS[60:70]), max_tokens=12))
    found, _ = run(on)
    assert found[0, 0] == (want[: want.index(want[5])], "stop")
    assert found[1, 0] == (greedy(engine, IDS[60:70], 12), "length")


class Seconds:
    """A clock that a block moves on by so many a token."""

    def __init__(self, on, each):
        self.now, self.blocks, decode = 0.0, [], on.steps.decode

        def timed(limit, told, *slots):
            block = decode(limit, told, *slots)
            self.blocks.append(int(block.count))
            self.now += self.each * self.blocks[-1]
            return block

        self.each, on.steps.decode, on._clock = each, timed, lambda: self.now


def test_a_block_has_as_many_tokens_as_fit_40_ms_and_one_for_a_new_row():
    on = fake_programs.scheduler(units=64, slots=4, block_s=loop.BLOCK_S)
    clock = Seconds(on, each=0.009)
    on.submit(Request(prompt=tuple(IDS[:9]), max_tokens=100))
    run(on, until=3)
    assert clock.blocks == [1, 4, 4]
    on.submit(Request(prompt=tuple(IDS[:7]), max_tokens=100))
    run(on, until=2)
    assert clock.blocks[3:] == [1, 4]
    clock.each = 0.1
    run(on, until=3)
    assert clock.blocks[5:] == [4, 1, 1]
    clock.each = 0.0001
    run(on, until=2)
    assert clock.blocks[8:] == [1, 32]


def test_whoever_reads_along_waits_for_one_token_and_others_have_whole_blocks():
    counts = {}
    for block_s in (np.inf, loop.BLOCK_S):
        on = fake_programs.scheduler(units=64, slots=8, block_s=block_s)
        Seconds(on, each=0.001)
        for row in range(8):
            on.submit(Request(prompt=tuple(IDS[row : row + 20]), max_tokens=97))
        found, steps = run(on)
        assert {len(new) for new, _ in found.values()} == {97}
        counts[block_s] = [len(step[0].tokens) for step in steps]
    assert counts[np.inf] == [32, 32, 32, 1]
    assert counts[loop.BLOCK_S] == [1, 32, 32, 32]


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_compiled(engine):
    fresh = dataclasses.replace(engine)
    on = scheduler(fresh, 8, slots=2, page=32)
    told = []
    on.warm_up(lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] == len(told)
    chosen = TokenSampling(temperature=0.8, top_p=0.9, top_k=5, seed=1)
    for length in (1, 31, 33, 100, 200):
        on.submit(Request(prompt=tuple(IDS[:length]), max_tokens=20, sampling=chosen, samples=2, logprobs=4))
        on.submit(Request(prompt=tuple(IDS[length : 2 * length]), max_tokens=3, stop=(1, 2)))
    run(on)
    assert on.stats.compilations == 0
    on.submit(Request(prompt=tuple(IDS[:9]), max_tokens=0, prompt_logprobs=1))
    run(on)
    assert on.stats.compilations == 1  # scores of prompts have a program of their own


@pytest.mark.slow
def test_with_a_window_a_text_is_longer_than_its_cache(tmp_path):
    """Units that nothing sees any more are of use to others, and tokens are those of full passes."""
    write_checkpoint(tmp_path / "theirs", dataclasses.replace(MISTRAL, max_positions=256, window=37))
    mesh = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    small = generate.load(model_folder.open_folder(tmp_path / "theirs"), mesh)
    window = small.config.window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "PIECE", 32)
        patch.setattr(loop, "LENGTHS", (32,))
        on = scheduler(small, 8, slots=2)  # of 128 tokens
        prompts = [tuple(IDS[:150]), tuple(IDS[150:190])]
        for prompt in prompts:
            on.submit(Request(prompt=prompt, max_tokens=60))
        most, found = 0, {}
        while on.busy:
            for chunk in on.step():
                found[chunk.request] = found.get(chunk.request, ()) + chunk.tokens
            most = max(most, *(len(one.held.units) for one in on._running), 0)
        assert most <= (window + 32) // 16 + 2
        assert found == {number: greedy(small, prompt, 60) for number, prompt in enumerate(prompts)}
        turn = prompts[1] + found[1] + (5, 6)
        number = on.submit(Request(prompt=turn, max_tokens=10))
        before = on.stats.prefix_hits
        assert run(on)[0][number, 0][0] == greedy(small, turn, 10)
        assert on.stats.prefix_hits - before >= len(turn) - 16
        with pytest.raises(UserError, match="for which a cache needs"):
            scheduler(small, 2).submit(Request(prompt=turn, max_tokens=10))


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["int8", "float8"])
def test_stored_formats_give_nearly_the_same_distribution(engine, kept):
    """Mean divergence over a text that is fed token by token."""
    plain, other = (scheduler(engine, 16, kv_dtype=how) for how in ("compute", kept))
    found = []
    for on in (plain, other):
        on.submit(Request(prompt=tuple(IDS[:200]), max_tokens=1, logprobs=20))
        run(on)
        found.append(np.asarray(jax.nn.log_softmax(on.steps.state.logits[0])))
    divergence = float((np.exp(found[0]) * (found[0] - found[1])).sum())
    assert 0 < divergence < 0.01


@pytest.mark.slow
def test_groups_of_devices_have_rows_and_units_of_their_own(engine, tmp_path):
    write_checkpoint(tmp_path / "theirs", LONG)
    on_mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    spread = generate.load(model_folder.open_folder(tmp_path / "theirs"), on_mesh)
    prompts = [tuple(IDS[a : a + n]) for a, n in ((0, 30), (50, 5), (100, 40), (150, 9), (200, 25))]
    on = scheduler(spread, 40)
    for prompt in prompts:
        on.submit(Request(prompt=prompt, max_tokens=20, samples=1))
    chosen = TokenSampling(temperature=1.0)
    on.submit(Request(prompt=prompts[0], max_tokens=6, samples=3, sampling=chosen))
    found, _ = run(on)
    for number, prompt in enumerate(prompts):
        assert found[number, 0][0] == greedy(engine, prompt, 20)
    for sample in range(3):
        assert found[5, sample][0] == run_alone(engine, prompts[0], 6, sampling=chosen, samples=[sample])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ()}, "prompt 1 is empty"),
        ({"prompt": (96,)}, "token 96, but the model's vocabulary is 0 to 95"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"max_tokens": 300}, "the model is meant for at most 256"),
        ({"max_tokens": 150}, "the cache has room for 128"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20; got 21"),
    ],
)
def test_what_can_never_be_served_is_refused(engine, fields, words):
    on = scheduler(engine, 8)
    with pytest.raises(UserError, match=words):
        on.submit(Request(**{"prompt": (1, 2, 3), "max_tokens": 4, **fields}))
    assert not on.busy


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"page": 48}, "page must be 16, 32, 64, 128; got 48"),
        ({"kv_dtype": "int4"}, "kv_dtype must be compute, int8, float8; got int4"),
    ],
)
def test_caches_that_cannot_be_are_refused(engine, more, words):
    with pytest.raises(UserError, match=words):
        loop.make_loop(engine, **more)


@pytest.mark.slow
def test_a_cache_is_as_long_as_the_memory_allows(engine, monkeypatch):
    monkeypatch.setattr(loop.meshes, "device_memory_bytes", lambda mesh: engine.held_bytes + 200_000)
    on = loop.make_loop(engine, slots=8)
    each = 2 * GQA.layers * GQA.kv_heads * GQA.width * 4 + 4
    assert on._units == int(200_000 * 0.9) // (64 * each)
    assert isinstance(on.steps.state.cache, nn.PagedCache)
    with pytest.raises(UserError, match=r"a cache of 8,192 tokens need .* on each device"):
        loop.make_loop(engine, kv_tokens=8192)


@pytest.mark.slow
def test_scores_of_prompts_are_counted_before_the_cache_is_sized(engine, monkeypatch):
    """As compiled: a whole prompt where it fits a quarter of what is free, else a part of one; more is refused."""
    for scored in (256, 128):
        needed = engine.programs.likelihood_bytes(engine.params, 1, scored)
        room = 4 * needed + 8
        limit = engine.held_bytes + int(room / 0.9) + 1
        monkeypatch.setattr(loop.meshes, "device_memory_bytes", lambda mesh, limit=limit: limit)
        on = loop.make_loop(engine, slots=64, scored_tokens=256)
        each = 2 * GQA.layers * GQA.kv_heads * GQA.width * 4 + 4
        assert on._units == min((room - needed) // (64 * each), 64 * 256 // 64)
        assert on._scored_tokens == scored
        if scored < 256:
            with pytest.raises(UserError, match=f"there is memory for scores of {scored:,} at once"):
                on.check(Request(prompt=tuple(IDS[: scored + 1]), max_tokens=0, prompt_logprobs=0))
