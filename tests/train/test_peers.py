"""Processes that watch each other, as threads of small scripts: who is missing, who is a stranger, where all stop."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from scalejax.errors import TemporaryFailure, UserError
from scalejax.train import peers


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def joined(count, timeout_s=30.0):
    """The `Peers` of all processes of a job, which are threads here."""
    port, found = free_port(), {}

    def join(number):
        own = peers.Peers()
        own.watch(peers.join("127.0.0.1", port, count, number, timeout_s), number, count, timeout_s)
        found[number] = own

    threads = [threading.Thread(target=join, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(count):
        found[number].present(found[0].token)
    return found


def script(body, *arguments):
    """A process that runs a few lines with `peers` at hand."""
    program = f"import socket, sys, time\nfrom scalejax.train import peers\n{body}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


WATCH = """
peers._LEAVE_S = 0.5
port, count, number = map(int, sys.argv[1:4])
peers.job.watch(peers.join('127.0.0.1', port, count, number, 20), number, count, 6)
"""


def test_all_processes_save_or_end_after_the_same_step():
    found = joined(3)
    stops = {number: [] for number in found}
    asked = {(0, 50): peers.SAVE, (2, 100): peers.SAVE, (1, 150): peers.END, (0, 200): peers.END}

    def steps(number):
        for step in range(1, 400):
            time.sleep(0.0002 * (number + 1))
            if (number, step) in asked:
                found[number].ask(asked[number, step])
            if (what := found[number].reached(step)) != peers.GO_ON:
                stops[number].append((step, what))

    threads = [threading.Thread(target=steps, args=[number]) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stops[0] == stops[1] == stops[2]
    assert [what for _, what in stops[0]][-1] == peers.END
    assert 2 <= len(stops[0]) <= 4


def test_a_process_alone_stops_after_the_running_step():
    alone = peers.Peers()
    assert [alone.reached(step) for step in (1, 2)] == [peers.GO_ON] * 2
    alone.ask(peers.SAVE)
    alone.ask(peers.END)
    assert alone.reached(3) == peers.SAVE
    assert [alone.reached(step) for step in (4, 5)] == [peers.END, peers.GO_ON]


def test_the_steps_of_another_run_count_anew():
    alone = peers.Peers()
    for step in range(1, 6):
        alone.reached(step)
    alone.ask(peers.SAVE)  # agreed on for step 6, which that run does not have
    alone.begin()
    alone.ask(peers.END)
    assert alone.reached(1) == peers.END


@pytest.mark.slow
def test_absent_processes_are_named_to_those_that_came():
    port, said = free_port(), {}

    def join(number):
        with pytest.raises(TemporaryFailure) as failure:
            peers.join("127.0.0.1", port, 4, number, 1.5)
        said[number] = str(failure.value)

    threads = [threading.Thread(target=join, args=[number]) for number in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0].startswith("processes 1, 3 of 4 did not come within 1.5 s. Nothing was trained.")
    assert said[2].startswith("process 1 and 1 more of 4 did not come in time, says process 0.")


def test_an_absent_process_0_is_named():
    with pytest.raises(TemporaryFailure, match=r"process 1 found process 0 absent: nobody .* within 0\.3 s"):
        peers.join("127.0.0.1", free_port(), 2, 1, 0.3)


@pytest.fixture
def start():
    """Process 0 of 2, in a thread: its port, what it found or said, and a function that waits for it."""

    def run(timeout_s):
        port, found = free_port(), {}

        def join():
            try:
                found.update(peers.join("127.0.0.1", port, 2, 0, timeout_s))
            except TemporaryFailure as failure:
                found["said"] = str(failure)

        thread = threading.Thread(target=join)
        thread.start()
        return port, found, thread.join

    return run


def connect(port):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            time.sleep(0.01)


@pytest.mark.parametrize("process", [0, 1])
def test_a_name_that_is_not_known_is_waited_for_on_kubernetes_alone(process, monkeypatch):
    port, asked, known = free_port(), [], socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        asked.append(host)
        if host == "train-0.train" and len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1" if host == "train-0.train" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"'train-0\.train' cannot be found"):
        peers.join("train-0.train", port, 2, process, 0.1)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(TemporaryFailure, match=r"cannot be found .* whether a headless Service gives it that name"):
        peers.join("train-0.train", port, 2, process, 0.1)
    asked.clear()
    with pytest.raises(TemporaryFailure, match=r"did not come within 0\.7 s|nobody answered there within 0\.7 s"):
        peers.join("train-0.train", port, 2, process, 0.7)
    assert asked[:3] == ["train-0.train"] * 3


def test_a_process_that_counts_otherwise_ends_alone(start):
    port, found, wait = start(0.5)
    with pytest.raises(UserError, match="--processes is 2 for process 0 and 3 for process 2"):
        peers.join("127.0.0.1", port, 3, 2, 20)
    wait()
    assert found["said"].startswith("process 1 of 2 did not come within 0.5 s. Nothing was trained. Process 2 was sent")


def test_another_token_is_sent_away_and_told(start):
    port, found, wait = start(0.5)
    with connect(port) as connection:
        peers.introduce(connection, 1, 2, b"secret")
        assert connection.recv(21)[:1] == peers._REFUSED
    wait()
    assert "its $SCALEJAX_JOB_TOKEN is another" in found["said"]


def test_a_process_with_another_token_ends_alone(start, monkeypatch):
    monkeypatch.setenv(peers.TOKEN, "secret")
    port, found, wait = start(20)
    own = peers._token

    def token():
        return b"another" if threading.current_thread() is threading.main_thread() else own()

    monkeypatch.setattr(peers, "_token", token)
    with pytest.raises(UserError, match=r"\$SCALEJAX_JOB_TOKEN differs from that of process 0"):
        peers.join("127.0.0.1", port, 2, 1, 20)
    monkeypatch.setattr(peers, "_token", own)
    with peers.join("127.0.0.1", port, 2, 1, 20)[0]:
        wait()
        found[1].close()


def test_the_answer_to_one_greeting_is_none_to_another(start):
    port, found, wait = start(20)
    with connect(port) as one, connect(port) as other:
        _, _, greeting = peers._MESSAGE.unpack(one.recv(21))
        other.recv(21)
        message = peers._message(b"J", 1, 2)
        other.sendall(message + peers._proof(b"", int.from_bytes(greeting, "big"), message))
        assert other.recv(21)[:1] == peers._REFUSED
    with peers.join("127.0.0.1", port, 2, 1, 20)[0]:
        wait()
        found[1].close()


def test_strangers_are_sent_away_and_hold_up_nobody(start, monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_S", 3600.0)
    monkeypatch.setattr(peers, "_GREETED", 30)
    port, found, wait = start(20)
    join = peers._message(b"J", 1, 2)  # what took the place of process 1, or with another count ended process 0
    wrong = (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, join + b"\0" * 32, b"J" + b"\xff" * 52, b"\0" * 53)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(connect(port))  # and says nothing
        for data in (b"J", join, peers._message(b"J", 1, 3)):
            opened.enter_context(connect(port)).sendall(data)  # and says no more
        for data in wrong:
            stranger = opened.enter_context(connect(port))
            with contextlib.suppress(OSError):  # reset, where not all of it was read
                stranger.sendall(data)
                assert stranger.recv(21)[:1] == peers._GREETING
                assert stranger.recv(100)[:1] == peers._REFUSED
                assert stranger.recv(100) == b""
        connection = peers.join("127.0.0.1", port, 2, 1, 20)[0]
        wait()
    with connection, found[1] as accepted:
        assert accepted.getpeername() == connection.getsockname()


def test_the_oldest_of_many_silent_connections_makes_room(start, monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_S", 3600.0)
    monkeypatch.setattr(peers, "_GREETED", 3)
    port, found, wait = start(20)
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(port)) for _ in range(4)]
        assert len(silent[0].recv(21)) == 21
        assert silent[0].recv(21) == b""
        with peers.join("127.0.0.1", port, 2, 1, 20)[0]:
            wait()
            found[1].close()


def test_a_process_that_is_done_still_hears_from_the_others(start):
    # It waits in jax for process 0, which may draw a report for longer than its silence would be borne.
    port, found, wait = start(20)
    with peers.join("127.0.0.1", port, 2, 1, 20)[0] as connection:
        wait()
        connection.sendall(peers._message(peers._DONE, 1, 0))
        own = peers.Peers()
        own.watch(found, 0, 2, 1.2)
        while 1 not in own._done:
            time.sleep(0.001)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while connection.recv(1 << 16):
                pass
        connection.settimeout(60)
        assert connection.recv(21)[:1] == peers._ALIVE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "status", "said"),
    [
        ("time.sleep(1); import os; os._exit(1)", 75, r"Error: process 1 is gone since \S+: its connection closed"),
        ("peers.job.present(1); time.sleep(60)", 75, "Error: process 1 did not present the token of this job"),
        (
            "peers.job._send = lambda *a, **k: None; time.sleep(60)",
            75,
            r"process 1 is silent since \S+, for more than 6 s",
        ),
        ("peers.job.leave(2); time.sleep(60)", 2, "process 1 ended with status 2"),
        ("peers.job.leave(0); time.sleep(0.1)", 0, "^$"),
    ],
    ids=["killed", "stranger", "silent", "ended", "done"],
)
def test_a_process_that_is_gone_ends_the_others_with_a_line(other, status, said):
    port = free_port()
    first = script(f"{WATCH}peers.job.present(peers.job.token); time.sleep({60 if status else 3})", port, 2, 0)
    second = script(WATCH + other, port, 2, 1)
    message = first.communicate(timeout=300)[1]
    second.kill()
    second.communicate()
    assert (first.returncode, len(message.splitlines())) == (status, 1 if status else 0), message
    assert re.search(said, message)


@pytest.mark.slow
def test_a_process_that_ends_with_an_error_keeps_its_status_when_the_others_go():
    port = free_port()
    body = "peers.job.present(peers.job.token); peers.job.leave(2); time.sleep(2); sys.exit(2)"
    first, second = script(WATCH + body, port, 2, 0), script(f"{WATCH}time.sleep(60)", port, 2, 1)
    assert [one.communicate(timeout=300)[1].count("Error: ") for one in (first, second)] == [0, 1]
    assert (first.returncode, second.returncode) == (2, 2)
