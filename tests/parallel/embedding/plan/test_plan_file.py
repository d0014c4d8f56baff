"""Plans as files that are kept beside a recipe."""

import json

import pytest

from scalejax.errors import UserError
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.towers import Partition

PLAN = ShardingPlan(
    tables=(
        TablePlan(table="a", kind="table_wise", ranks=(3,)),
        TablePlan(table='"b"', kind="column_wise", columns=4),
        TablePlan(table="c", kind="data_parallel", update="psum"),
        TablePlan(table="d"),
    ),
    replicas="copy",
    devices=8,
)
TOWERS = ShardingPlan(tables=PLAN.tables[:1], devices=8, towers=(("x", "y"), ("z",)))


@pytest.mark.parametrize("plan", [PLAN, TOWERS, ShardingPlan(), ShardingPlan(tables=(TablePlan(table="é"),))])
def test_what_was_saved_is_loaded(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    assert eval(repr(plan)) == plan  # and its text can stand in a recipe


def test_a_file_has_a_line_for_each_table_and_no_defaults(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '    {"table": "a", "kind": "table_wise", "ranks": [3]},\n' in text
    assert '    {"table": "d"}\n' in text
    assert json.loads(text)["devices"] == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "as JSON"),
        ("[]", "must be an object with any of tables, replicas, devices, towers; got list"),
        ('{"table": []}', "got table"),
        ('{"tables": {}}', "tables in .* must be a list; got dict"),
        ('{"tables": [3]}', r"tables\[0\] of .* must be an object"),
        ('{"tables": [{"kind": "row_wise"}]}', r"table in tables\[0\] of .* is missing"),
        ('{"tables": [{"table": "a", "rank": [0]}]}', "got rank, table"),
        ('{"tables": [{"table": "a", "ranks": ["0"]}]}', r"ranks in tables\[0\]"),
        ('{"tables": [{"table": "a", "ranks": 0}]}', r"ranks in tables\[0\]"),
        ('{"tables": [{"table": "a", "columns": true}]}', r"columns in tables\[0\]"),
        ('{"devices": "8"}', "devices in .* whole number"),
    ],
)
def test_files_that_hold_no_plan_are_refused(text, said, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=f"ShardingPlan: .*{said}"):
        ShardingPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"towers": [["x"], []]}', "tower 1 is empty"),
        ('{"towers": [["x"], ["x", "y"]]}', "x appear twice"),
        ('{"towers": ["x"]}', r'plan.json must be {"towers": \[\[name'),
        ('{"towers": {"towers": [["x"]]}}', "plan.json must be"),
    ],
)
def test_towers_of_a_file_that_are_no_partition_are_refused(text, said, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=f"Partition: .*{said}"):
        ShardingPlan.load(tmp_path / "plan.json")


def test_a_model_can_take_its_towers_from_a_plan(tmp_path):
    TOWERS.save(tmp_path / "plan.json")
    assert Partition.load(tmp_path / "plan.json").towers == TOWERS.towers


def test_a_plan_that_cannot_be_written_or_found_says_so(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        PLAN.save(tmp_path / "no" / "plan.json")
    with pytest.raises(UserError, match=r"cannot read .*scalejax shard --save"):
        ShardingPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "content",
    [
        ShardingPlan(
            tables=(TablePlan(table="shop", kind="table_wise", ranks=(1,)), TablePlan(table="item")), devices=2
        ),
        Partition(towers=(("shop",), ("item", "hour"))),
    ],
    ids=["plan", "towers"],
)
def test_a_flipped_bit_is_refused_and_an_edit_leaves_the_digest_out(tmp_path, content):
    path = tmp_path / "file.json"
    content.save(path)
    assert type(content).load(path) == content
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert type(content).load(path) == content  # a blank that became another
        except UserError as error:
            assert str(path) in str(error)
    edited = json.loads(whole)
    del edited["digest"]
    path.write_text(json.dumps(edited).replace("shop", "town"))
    assert type(content).load(path) != content
