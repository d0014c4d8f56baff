"""Bytes by the level of links, counted device by device."""

import itertools

import pytest

from scalejax.parallel import links
from scalejax.parallel.links import SentBytes

HOSTS, LOCAL, PAYLOAD = 3, 4, 1200.0


def test_an_all_to_all_sends_each_part_to_its_device():
    part, sent = PAYLOAD / (HOSTS * LOCAL), {True: 0.0, False: 0.0}
    for host, device in itertools.product(range(HOSTS), range(LOCAL)):
        if (host, device) != (0, 0):
            sent[host == 0] += part
    assert links.sent("all-to-all", PAYLOAD, HOSTS, LOCAL) == SentBytes(sent[True], sent[False])


def test_what_is_gathered_crosses_once_to_each_other_host_and_is_handed_on_there():
    shard = PAYLOAD / (HOSTS * LOCAL)
    between = HOSTS * LOCAL * (HOSTS - 1) * shard  # each shard to each other host
    within = HOSTS * HOSTS * LOCAL * (LOCAL - 1) * shard  # on each host each shard to the devices that lack it
    mean = SentBytes(within / (HOSTS * LOCAL), between / (HOSTS * LOCAL))
    for kind in ("all-gather", "reduce-scatter"):
        found = links.sent(kind, PAYLOAD, HOSTS, LOCAL)
        assert (found.within, found.between) == pytest.approx((mean.within, mean.between))
    assert links.sent("all-reduce", PAYLOAD, HOSTS, LOCAL) == found + found


def test_a_group_on_one_level_sends_nothing_on_the_other():
    assert links.sent("all-gather", PAYLOAD, 1, 4) == SentBytes(within=900)
    assert links.sent("all-reduce", PAYLOAD, 4, 1) == SentBytes(between=1800)
    assert links.sent("collective-permute", PAYLOAD, 2, 1) == SentBytes(between=PAYLOAD)
    assert links.sent("all-to-all", PAYLOAD, 1, 1) == SentBytes()
    assert links.levels(("replica", "fsdp"), {"replica": 2, "fsdp": 4}) == (2, 4)
    assert links.levels(("fsdp",), {"replica": 2, "fsdp": 4}) == (1, 4)
