"""Collectives of real programs: exact bytes per device, counts, axes; and the forms that TPU compilers write."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stablehlo
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plan import small_programs

from scalejax.plan import collectives_table, explain_sharding
from scalejax.plan.compiled import collectives, hlo

STORED = pathlib.Path(__file__).parent / "hlo"


def _mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _absent_mesh(slices=1, **sizes):
    """As much of a mesh as the parser reads, for devices that are not here."""
    shape = tuple(sizes.values())
    count = int(np.prod(shape))
    devices = np.empty(count, object)
    for index in range(count):
        place, within = divmod(index, count // slices)
        devices[index] = types.SimpleNamespace(
            id=(place + 1) * 100000 + within, coords=(within, 0, 0), slice_index=place
        )
    return types.SimpleNamespace(devices=devices.reshape(shape), axis_names=tuple(sizes), shape=sizes, size=count)


def _rows(found):
    return {(c.kind, c.axis): (c.bytes, c.count) for c in collectives.total(found)}


@pytest.fixture(scope="module")
def lowered():
    function, x = small_programs.every_collective(_mesh(data=4, model=2), 64)
    return function.lower(x)


def test_every_collective_has_its_bytes_and_trip_count_on_cpu(lowered):
    found = explain_sharding(lowered.compile())
    assert _rows(found) == small_programs.expected_collectives(4, 2, 64)
    assert all(c.trip_count_known for c in found)


def test_a_table_has_a_line_for_each_kind_and_axis_of_a_program_compiled_here(lowered):
    lines = collectives_table(explain_sharding(lowered.compile())).splitlines()
    cells = [re.split(r" {2,}", line) for line in lines]
    assert cells[0] == ["kind", "axis", "devices", "count", "bytes", "least to send"]
    counts = {row: count for row, (_, count) in small_programs.expected_collectives(4, 2, 64).items()}
    assert {(kind, axis): int(count) for kind, axis, _, count, _, _ in cells[1:]} == counts
    assert ["all-gather", "data", "4", "1", "16 KiB", "12 KiB"] in cells  # 3/4 of it must arrive
    assert collectives_table([]) == "no collectives"


def test_the_stated_program_moves_the_same_bytes(lowered):
    found = stablehlo.stated_collectives(lowered, _mesh(data=4, model=2))
    assert _rows(found) == small_programs.expected_collectives(4, 2, 64)


@pytest.mark.parametrize(
    ("chip", "data", "model"), [("v5e_2x2", 2, 2), ("v5p_2x2x2", 4, 2), ("v6e_2x4", 4, 2), ("tpu7x_2x2x1", 4, 2)]
)
def test_every_collective_is_found_in_the_form_of_each_tpu(chip, data, model):
    module = hlo.parse((STORED / f"every_collective_{chip}.txt").read_text())
    found = collectives.of_module(module, _absent_mesh(data=data, model=model))
    assert _rows(found) == small_programs.expected_collectives(data, model, 256)
    assert all(c.trip_count_known for c in found)


def test_an_asynchronous_collective_that_stands_in_three_fusions_counts_once():
    text = (STORED / "fsdp_v5e_4x4.txt").read_text()
    assert text.count("all-gather(") == 4  # one plain, one as start, beside compute and done
    found = collectives.of_module(hlo.parse(text), _absent_mesh(fsdp=16, tensor=1))
    # Three layers of bfloat16[1024, 1024]: gathered forward and backward, gradients reduced once.
    layer = 2 * 1024 * 1024
    assert _rows(found) == {("all-gather", "fsdp"): (6 * layer, 6), ("all-reduce", "fsdp"): (3 * layer, 3)}


def test_transfers_between_slices_count_as_the_collectives_they_are():
    module = hlo.parse((STORED / "two_slices_v5p_2x2x1.txt").read_text())
    found = _rows(collectives.of_module(module, _absent_mesh(slices=2, replica=2, fsdp=4)))
    shard = 64 * 128 * 4
    assert found == {
        ("all-gather", "replica"): (2 * shard, 1),
        ("collective-permute", "replica"): (shard, 1),
        ("all-to-all", "replica+fsdp"): (shard, 1),
        # A psum over both: reduced inside the slice (of which a quarter is kept), reduced across, gathered inside.
        ("all-reduce", "fsdp"): (shard, 1),
        ("all-reduce", "replica"): (shard // 4, 1),
        ("all-gather", "fsdp"): (shard, 1),
    }


def test_fsdp_under_jit_gathers_weights_and_reduces_gradients_over_its_axis():
    mesh = _mesh(replica=2, fsdp=4)

    def loss(w, x):
        return jnp.sum(jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(("replica", "fsdp")))) ** 2)

    def leaf(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w, x = leaf((64, 32), "fsdp"), leaf((256, 64), ("replica", "fsdp"))
    step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), out_shardings=w.sharding)
    found = explain_sharding(step.lower(w, x).compile())
    assert _rows(found)[("all-gather", "fsdp")] == (64 * 32 * 4, 1)
    reduced = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
    assert {axis for c in reduced for axis in c.axes} == {"replica", "fsdp"}


@pytest.mark.parametrize(("given", "room"), [(16, 8), (8, 16)])
def test_a_ragged_exchange_moves_no_more_than_there_is_and_than_there_is_room_for(given, room):
    module = hlo.parse(
        f"""HloModule m
ENTRY %main (a: f32[{given},4], b: f32[{room},4], n: s32[4]) -> f32[{room},4] {{
  %a = f32[{given},4]{{1,0}} parameter(0)
  %b = f32[{room},4]{{1,0}} parameter(1)
  %n = s32[4]{{0}} parameter(2)
  ROOT %r = f32[{room},4]{{1,0}} ragged-all-to-all(%a, %b, %n, %n, %n, %n), replica_groups={{{{0,1,2,3}}}}
}}
"""
    )
    (found,) = collectives.of_module(module, _absent_mesh(data=4))
    assert (found.kind, found.axis, found.bytes) == ("ragged-all-to-all", "data", 8 * 4 * 4)


def test_a_loop_that_the_data_end_is_marked():
    mesh = _mesh(data=8)

    def body(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 3.0, lambda c: c + jax.lax.pmax(c, "data"), x)

    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    (one,) = explain_sharding(function.lower(jnp.ones((8, 4))).compile(), mesh)
    assert (one.kind, one.bytes, one.count, one.trip_count_known) == ("all-reduce", 16, 1, False)


def test_the_least_to_send_follows_the_closed_forms():
    assert collectives.minimum_bytes("all-gather", 800, 8) == 700
    assert collectives.minimum_bytes("all-reduce", 800, 8) == 1400
    assert collectives.minimum_bytes("all-to-all", 800, 1) == 0
    assert collectives.minimum_bytes("collective-permute", 800, 8) == 800


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),  # the major half of an axis
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_reads_groups_in_every_form(text, groups):
    assert collectives.parse_groups(text, 4) == groups


def test_refuses_groups_of_an_unknown_form():
    with pytest.raises(ValueError, match="parse_groups"):
        collectives.parse_groups("everyone", 4)


def test_a_program_without_shardings_needs_a_mesh():
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    with pytest.raises(ValueError, match="mesh must be given"):
        explain_sharding(compiled)
    assert explain_sharding(compiled, _mesh(data=8)) == []
