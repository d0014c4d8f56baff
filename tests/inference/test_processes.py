"""Messages between the processes of an engine; what several processes do is in tests/multiprocess."""

import socket

import numpy as np
import pytest

from scalejax.errors import TemporaryFailure
from scalejax.inference import processes


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs


class Recorded:
    """In the place of `Steps`."""

    def __init__(self):
        self.calls = []

    def read(self, *arguments):
        self.calls.append(arguments)


def test_arrays_and_words_arrive_as_they_were(pair):
    ours, theirs = pair
    given = (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.bool_(True),
        np.float32([0.5]),
        "pass_q",
        np.zeros((0, 4), np.uint32),
    )
    followers, steps = processes.Followers([ours]), Recorded()
    followers.announce("read", given)
    followers.end()
    processes.follow(steps, theirs)
    (found,) = steps.calls
    for one, other in zip(found, given, strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
        if not isinstance(one, str):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)


def test_what_is_no_operation_is_not_done(pair):
    ours, theirs = pair
    ours.sendall(processes.encoded("__init__", ()))
    with pytest.raises(ValueError, match="the operation must be one of read, decode"):
        processes.follow(Recorded(), theirs)
    ours.sendall(processes.encoded("read", (np.zeros(2, "datetime64[s]"),)))
    with pytest.raises(ValueError, match="arrays must be int32"):
        processes.follow(Recorded(), theirs)


def test_an_end_without_a_word_is_a_failure_of_the_moment(pair):
    ours, theirs = pair
    ours.sendall(processes.encoded("read", (np.zeros(1000, np.int32),))[:-1])
    ours.close()
    with pytest.raises(TemporaryFailure, match="process 0 is gone"):
        processes.follow(Recorded(), theirs)
