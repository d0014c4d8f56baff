"""The text of compiled programs: shapes, tiles, and how often a loop body runs."""

import jax
import jax.numpy as jnp
import pytest

from scalejax.plan.compiled import hlo


def _module(body, condition, start, attributes=""):
    return hlo.parse(
        f"""HloModule m
%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %p = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %step = s32[] constant(1)
{body}
  ROOT %out = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %x, %n)
}}
%condition (q: (s32[], f32[4], s32[])) -> pred[] {{
  %q = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=2
  %limit = s32[] constant(7)
{condition}
}}
ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %zero = s32[] constant({start})
  %ten = s32[] constant(10)
  %copied = s32[] copy(%zero)
  %init = (s32[], f32[4]{{0}}, s32[]) tuple(%copied, %a, %ten)
  %loop = (s32[], f32[4]{{0}}, s32[]) while(%init), condition=%condition, body=%body{attributes}
  ROOT %r = f32[4]{{0}} get-tuple-element(%loop), index=1
}}
"""
    )


ADD = "  %next = s32[] add(%i, %step)"
LESS = "  ROOT %t = pred[] compare(%j, %limit), direction=LT"


@pytest.mark.parametrize(
    ("body", "condition", "start", "attributes", "trips"),
    [
        (ADD, LESS, 0, "", 7),
        (ADD, LESS, 3, "", 4),
        (ADD, LESS, 9, "", 0),
        (ADD, LESS.replace("LT", "LE"), 0, "", 8),
        (ADD, "  ROOT %t = pred[] compare(%limit, %j), direction=GT", 0, "", 7),
        ("  %two = s32[] constant(2)\n  %next = s32[] add(%two, %i)", LESS, 0, "", 4),
        ("  %next = s32[] subtract(%i, %step)", LESS.replace("LT", "GT"), 9, "", 2),
        (ADD, "  ROOT %t = pred[] compare(%j, %m), direction=LT", 0, "", 10),  # a limit carried unchanged
        (ADD, LESS, 0, ', backend_config={"known_trip_count":{"n":"5"}}', 5),
        ("  %next = s32[] multiply(%i, %step)", LESS, 0, "", None),
        (ADD, "  ROOT %t = pred[] custom-call(%j)", 0, "", None),
    ],
)
def test_reads_trip_counts(body, condition, start, attributes, trips):
    module = _module(body, condition, start, attributes)
    main = module.computations["main"]
    assert hlo.trip_count(module, main, main.by_name["loop"]) == trips
    counts = {e.computation.name: (e.count, e.known) for e in module.executions()}
    assert counts["body"] == (1 if trips is None else trips, trips is not None)


def test_nested_scans_multiply():
    def inner(c, _):
        return jnp.tanh(c @ c), None

    def outer(c, _):
        return jax.lax.scan(inner, c, None, length=5)[0], None

    compiled = jax.jit(lambda x: jax.lax.scan(outer, x, None, length=3)[0]).lower(jnp.ones((16, 16))).compile()
    dots = [
        e.count
        for e in hlo.parse(compiled.as_text()).executions()
        for i in e.computation.instructions
        if i.opcode == "dot"
    ]
    assert dots == [15]


def test_reads_tuples_comments_tiles_and_memory_spaces():
    text = """HloModule m
ENTRY %main (a: bf16[5,70]) -> (bf16[5,70], s4[3]) {
  %a = bf16[5,70]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %c = s4[3]{0:T(256)} constant({1, 2, /*index=2*/3})
  ROOT %t = (bf16[5,70]{0,1:T(8,128)(2,1)}, /*index=1*/s4[3]{0:T(256)}) tuple(%a, /*index=1*/%c), metadata={op_name="f"}
}
"""
    main = hlo.parse(text).computations["main"]
    (a,) = main.by_name["a"].arrays
    assert (a.dims, a.padded, a.space, a.bytes) == ((5, 70), (8, 128), 1, 700)
    first, second = main.root.arrays
    assert (first.padded, first.space) == ((128, 72), 0)  # dimension 0 is minor here
    assert (second.bytes, second.memory_bytes) == (2, 128)  # 3 and 256 values of 4 bits
    assert main.root.operands == ("a", "c")
    assert main.root.label == "f"


def test_attributes_over_several_lines_end_neither_an_instruction_nor_a_computation():
    text = """HloModule m
ENTRY %main (a: f32[4]) -> f32[4] {
  %k = f32[4]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="kernel"}
  ROOT %t = f32[4]{0} negate(%k), metadata={op_name="f"}
}
"""
    main = hlo.parse(text).computations["main"]
    assert [i.opcode for i in main.instructions] == ["custom-call", "negate"]
    assert [i.label for i in main.instructions] == ["kernel", "f"]


def test_refuses_text_without_an_entry():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("module @jit_f {}")


def test_refuses_a_compiler_that_shows_no_text():
    with pytest.raises(ValueError, match="does not show its programs"):
        hlo.parse(None)
