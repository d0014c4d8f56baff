"""An exported click model behind HTTP: scores of the program itself, batches of several clients, one size compiled."""

import concurrent.futures
import contextlib
import json
import threading
import time

import click_cases
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from starlette.testclient import TestClient

from scalejax.errors import UserError
from scalejax.inference import reload
from scalejax.inference.recommendation import export, lowering, precision
from scalejax.inference.server.app import ServerSettings
from scalejax.inference.server.protocol import ApiError
from scalejax.inference.server.scores import IDS_PER_ROW, Scorer, ScoreServer

MOST = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = click_cases.model("dlrm")
    folder = tmp_path_factory.mktemp("export") / "clicks"
    export.write(lowering.lower(made, precision.uniform(made, tables="float32", dense="float32"), None), folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return reload.load(folder)


@pytest.fixture(scope="module")
def direct(folder):
    """Loaded again, and called without a server."""
    return reload.load(folder)


@pytest.fixture(scope="module")
def scorer(model):
    made = Scorer(model, most=MOST)
    made.warm_up()
    return made


@contextlib.contextmanager
def served(scorer, **changes):
    settings = {"name": "clicks", "slots": 256, "max_queue": 64, "max_queue_tokens": 1000} | changes
    server = ScoreServer(scorer, ServerSettings(**settings))
    server.thread.start()
    with TestClient(server.app, "http://localhost", raise_server_exceptions=False) as client:
        client.server = server
        yield client
        assert server.thread.stop(10)
    assert not server.jobs


@pytest.fixture
def serve(scorer):
    """serve(**settings) -> a client; what a test left in the queue is gone before the next."""
    with contextlib.ExitStack() as stack:
        yield lambda **changes: stack.enter_context(served(scorer, **changes))
    assert not scorer.busy


@pytest.fixture(scope="module")
def lasting(scorer):
    with served(scorer) as client:
        yield client


def rows_of(count, seed=0):
    one = click_cases.batch(count, seed=seed)
    lists = one.features.to_lists()
    rows = []
    for at in range(count):
        ids = {"user": int(lists["user"][at][0]), "shown": [int(i) for i in lists["shown"][at]]}
        rows.append({"ids": ids | {"pages": [int(i) for i in lists["pages"][at]]}, "dense": one.dense[at].tolist()})
    return rows


def score(client, rows, **body):
    return client.post("/v1/score", json={"model": "clicks", "rows": rows} | body)


def inputs_by_hand(rows, bucket):
    """What the program takes, filled up to a bucket."""
    found = {
        "ids/user": np.zeros((bucket, 1), np.int32),
        "ids/shown": np.zeros((bucket, 2), np.int32),
        "ids/pages": np.zeros(bucket * IDS_PER_ROW, np.int32),
        "lengths/pages": np.zeros(bucket, np.int32),
        "dense": np.zeros((bucket, 3), np.float32),
    }
    for at, row in enumerate(rows):
        found["ids/user"][at], found["ids/shown"][at] = row["ids"]["user"], row["ids"]["shown"]
        found["lengths/pages"][at], found["dense"][at] = len(row["ids"]["pages"]), row["dense"]
    pages = [page for row in rows for page in row["ids"]["pages"]]
    found["ids/pages"][: len(pages)] = pages
    return found


def logits_of(response):
    assert response.status_code == 200, response.text
    return np.array([row["logits"] for row in response.json()["data"]], np.float32)


def check_error(response, status, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert param is None or error["param"] == param
    return error


def wait_for(condition):
    while not condition():
        time.sleep(0.005)


@pytest.fixture
def held(model, monkeypatch):
    """Holds the next batches until its `set`, and keeps their inputs."""
    go, batches, run = threading.Event(), [], model.run

    def slowly(inputs):
        batches.append(inputs)
        assert go.wait(300)
        return run(inputs)

    monkeypatch.setattr(model, "run", slowly)
    go.batches = batches
    yield go
    go.set()


@pytest.mark.slow
def test_scores_are_to_the_bit_those_of_the_program_in_the_same_bucket(serve, direct):
    client = serve()
    for count in (1, 2, 3, 8):
        rows = rows_of(count, seed=count)
        bucket = 1 << (count - 1).bit_length()
        body = score(client, rows).json()
        want = direct.run(inputs_by_hand(rows, bucket))
        for name in ("logits", "probabilities"):
            got = np.array([row[name] for row in body["data"]], np.float32)
            assert np.array_equal(got, want[name][:count]), (name, count)
        assert [row["index"] for row in body["data"]] == list(range(count))
        assert (body["model"], body["labels"], body["usage"]) == ("clicks", ["label"], {"rows": count})
        called = direct(
            {name: [row["ids"][name] for row in rows] for name in ("user", "shown", "pages")},
            [row["dense"] for row in rows],
        )
        assert np.abs(called["logits"] - want["logits"][:count]).max() < 1e-6


def test_requests_of_several_clients_are_one_batch_and_each_has_its_rows(serve, direct, held):
    client = serve()
    parts = [rows_of(count, seed=count) for count in (1, 2, 1, 3, 1)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        first = pool.submit(score, client, rows_of(1))
        wait_for(lambda: held.batches)  # it runs; what comes now is the next batch
        others = []
        for place, rows in enumerate(parts):
            others.append(pool.submit(score, client, rows))
            wait_for(lambda count=place + 1: len(client.server.thread._inbox) == count)
        held.set()
        got = [logits_of(other.result()) for other in others]
        first.result()
    assert [batch["dense"].shape[0] for batch in held.batches] == [1, MOST]
    together = [row for rows in parts for row in rows]
    assert np.array_equal(np.concatenate(got), direct.run(inputs_by_hand(together, MOST))["logits"])
    for rows, logits in zip(parts, got, strict=True):  # whatever the neighbours
        assert np.array_equal(logits, direct.run(inputs_by_hand(rows, MOST))["logits"][: len(rows)])


def test_nothing_is_compiled_after_the_start_whatever_comes(serve, scorer):
    client = serve()
    sizes = [(1, 0), (5, 3), (8, 1), (2, 2 * IDS_PER_ROW), (1, MOST * IDS_PER_ROW), (7, 11)]
    for count, pages in sizes:
        rows = rows_of(count, seed=count)
        rows[0]["ids"]["pages"] = [3] * pages
        assert score(client, rows).status_code == 200
    assert scorer.stats.compilations == 0
    text = client.get("/metrics").text
    assert 'scalejax:compilations_total{model_name="clicks"} 0.0' in text
    assert f'scalejax:rows_scored_total{{model_name="clicks"}} {scorer.stats.rows}.0' in text
    assert 'request_success_total{finished_reason="stop",model_name="clicks"} 6.0' in text
    assert "kv_cache" not in text


WRONG = [
    ({"rows": None}, "rows"),
    ({"rows": []}, "rows"),
    ({"rows": {}}, "rows"),
    ({"rows": [1]}, "rows[0]"),
    ({"row": {"id": {}}}, "rows[0]"),
    ({"ids": {"user": None}}, "rows[0].ids"),
    ({"ids": {"other": 1}}, "rows[0].ids"),
    ({"user": True}, "rows[0].ids.user"),
    ({"user": 300}, "rows[0].ids.user"),
    ({"user": -1}, "rows[0].ids.user"),
    ({"user": 10**30}, "rows[0].ids.user"),
    ({"user": [1, 2]}, "rows[0].ids.user"),
    ({"user": 1.0}, "rows[0].ids.user"),
    ({"shown": 1}, "rows[0].ids.shown"),
    ({"shown": [1]}, "rows[0].ids.shown"),
    ({"pages": 1}, "rows[0].ids.pages"),
    ({"pages": ["1"]}, "rows[0].ids.pages"),
    ({"pages": [0] * (MOST * IDS_PER_ROW + 1)}, "rows"),
    ({"dense": [1, 2]}, "rows[0].dense"),
    ({"dense": [1, 2, "3"]}, "rows[0].dense"),
    ({"dense": [1, 2, 1e39]}, "rows[0].dense"),
    ({"dense": [1, 2, 10**400]}, "rows[0].dense"),
    ({"dense": [1, 2, float("nan")]}, "rows[0].dense"),
    ({"dense": None}, "rows[0].dense"),
    ({"body": {"temperature": 1}}, "temperature"),
    ({"body": {"model": "other"}}, "model"),
]


def body_with(change):
    (row,) = rows_of(1)
    body = {"model": "clicks", "rows": [row]}
    for name, value in change.items():
        if name == "rows":
            body["rows"] = value
        elif name in row["ids"]:
            row["ids"][name] = value
        elif name == "ids":
            row["ids"] |= {k: v for k, v in value.items() if v is not None}
            row["ids"] = {k: v for k, v in row["ids"].items() if value.get(k, ...) is not None}
        elif name == "dense":
            row["dense"] = value
        else:
            (row if name == "row" else body).update(value)
    return body


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[str(change)[:40] for change, _ in WRONG])
def test_what_is_wrong_is_named_and_disturbs_nobody(lasting, change, param):
    headers = {"content-type": "application/json"}
    response = lasting.post("/v1/score", content=json.dumps(body_with(change)), headers=headers)
    check_error(response, 404 if param == "model" else 400, param)
    assert score(lasting, rows_of(2)).status_code == 200


def test_malformed_bodies_routes_and_models(lasting):
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 10_000):
        check_error(lasting.post("/v1/score", content=content, headers=headers), 400)
    check_error(lasting.post("/v1/score", data={"rows": "a"}), 415)
    check_error(lasting.post("/v1/score", content=b" " * (4 * 2**20 + 1), headers=headers), 413)
    check_error(score(lasting, rows_of(MOST + 1)), 400, "rows")
    check_error(lasting.post("/v1/completions", json={"prompt": "a"}), 404)
    described = lasting.get("/v1/models/clicks").json()
    assert described["features"]["pages"] == {"rows": 120, "length": None}
    assert (described["dense"], described["max_rows"]) == (["price", "age", "hour"], MOST)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=100)
@hypothesis.given(name=st.sampled_from(["rows", "user", "shown", "pages", "dense", "row", "body"]), value=JSON)
def test_no_body_ends_in_a_failure_of_the_server(lasting, name, value):
    if name in ("row", "body"):
        value = {"x": value}
    content = json.dumps(body_with({name: value}))
    response = lasting.post("/v1/score", content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        check_error(response, 400)


def test_a_full_queue_refuses_at_once_and_what_was_taken_finishes(serve, held):
    client = serve(max_queue=3)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        first = pool.submit(score, client, rows_of(1))
        wait_for(lambda: held.batches)
        others = [pool.submit(score, client, rows_of(1)) for _ in range(12)]
        wait_for(lambda: len(client.server.thread._inbox) == 12)
        held.set()
        codes = [other.result().status_code for other in [first, *others]]
    refused = [other.result() for other in others if other.result().status_code == 429]
    assert codes.count(200) == 1 + 1 + 3  # one ran, one begins with the next step, three wait
    for response in refused:
        assert check_error(response, 429)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
    assert score(client, rows_of(1)).status_code == 200


def test_rows_that_wait_are_bounded_too(serve, held):
    client = serve(max_queue_tokens=10)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first = pool.submit(score, client, rows_of(1))
        wait_for(lambda: held.batches)
        others = [pool.submit(score, client, rows_of(6)) for _ in range(5)]
        wait_for(lambda: len(client.server.thread._inbox) == 5)
        held.set()
        codes = [other.result().status_code for other in others]
        assert first.result().status_code == 200
    assert set(codes) == {200, 429}


def test_a_key_and_the_end(serve):
    client = serve(api_key="secret")
    assert client.get("/health").status_code == 200
    check_error(score(client, rows_of(1)), 401)
    client.headers["authorization"] = "Bearer secret"
    assert score(client, rows_of(1)).status_code == 200
    client.server.draining = True
    check_error(client.get("/health"), 503)
    assert check_error(score(client, rows_of(1)), 503)["code"] == "draining"


def test_what_runs_when_the_end_begins_is_finished_and_what_is_ended_has_an_error(serve, held):
    client = serve()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(score, client, rows_of(1))
        wait_for(lambda: held.batches)
        client.server.draining = True
        held.set()
        assert first.result().status_code == 200
        client.server.draining = False
        held.clear()
        second = pool.submit(score, client, rows_of(1))
        wait_for(lambda: len(held.batches) == 2)
        client.portal.call(client.server.end_all, ApiError("this server is ending.", status=503, code="draining"))
        assert check_error(second.result(), 503)["code"] == "draining"
        held.set()


def test_scores_that_are_not_finite_end_their_request_alone(serve, held):
    client = serve()
    huge = rows_of(1)
    huge[0]["dense"] = [3.4e38] * 3
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(score, client, rows_of(1))
        wait_for(lambda: held.batches)
        bad, good = pool.submit(score, client, huge), pool.submit(score, client, rows_of(2))
        wait_for(lambda: len(client.server.thread._inbox) == 2)
        held.set()
        assert "not finite" in check_error(bad.result(), 500)["message"]
        assert len(logits_of(good.result())) == 2
        first.result()
    assert len(held.batches) == 2


def test_a_fault_of_the_device_ends_everything(model, monkeypatch):
    def broken(inputs):
        raise RuntimeError("the device is gone")

    with served(Scorer(model, most=MOST)) as client:
        monkeypatch.setattr(model, "run", broken)
        assert check_error(score(client, rows_of(1)), 500)["code"] == "device_fault"
        check_error(client.get("/health"), 500)


def test_a_scorer_refuses_what_is_larger_than_a_batch(scorer, model):
    with pytest.raises(UserError, match="at most 8 and 128 ids of a feature"):
        scorer.check(type("Request", (), {"inputs": {"ids/pages": np.zeros(9)}, "size": 9})())
