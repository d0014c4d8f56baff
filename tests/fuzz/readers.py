"""The readers that are fuzzed: an intact sample of each, the file of it that is damaged, and what reading it means."""

import gzip
import hashlib
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Attributes:
      write: Writes an intact sample into a folder.
      target: The file of it that is damaged.
      read: Reads a folder; a digest of all that a user of the reader would get.
      checked: Whether checksums cover the file, so that what is read of a damaged one must be what the intact one has.
    """

    write: Callable[[pathlib.Path], None]
    target: str
    read: Callable[[pathlib.Path], str]
    checked: bool = False

    def sample(self) -> dict[str, bytes]:
        """Name -> content of the files of the intact sample."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            self.write(folder)
            files = [path for path in folder.rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _digest(*values: Any) -> str:
    sums = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            sums.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            sums.update(repr(value).encode())
    return sums.hexdigest()


def _of_data(data: Any) -> str:
    found: list[Any] = [data.schema]
    for split in ("train", "validation", "test"):
        examples = data.examples.held(split, 0, data.num_examples(split))
        found.append(examples.records)
        found += [array for lists in examples.jagged for array in (lists.offsets - lists.offsets[0], lists.values)]
    return _digest(*found)


def _columns() -> dict[str, Any]:
    from scalejax.data.examples.records import Ragged

    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, 100)
    tags = Ragged(np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, 7, lengths.sum(), dtype=np.int32))
    return {
        "user": rng.integers(0, 50, 100),
        "tag": tags,
        "x": rng.normal(size=100).astype(np.float32),
        "label": rng.integers(0, 2, 100),
    }


def _features() -> tuple[Any, ...]:
    from scalejax.data.examples.schema import Categorical

    return Categorical(name="user", rows=50), Categorical(name="tag", rows=7, length=None, capacity=3.0)


def _write_arrow(folder: pathlib.Path) -> None:
    from scalejax.data.examples.memory import from_columns
    from scalejax.data.examples.schema import Schema
    from scalejax.data.tables import arrow

    data = from_columns(_columns(), Schema(categorical=_features(), dense=("x",)), batch_size=16)
    arrow.convert(data, folder / "rows.arrow", chunk_rows=30)


def _write_arrow_of_format_1(folder: pathlib.Path) -> None:
    _write_arrow(folder)
    as_format_1(folder / "rows.arrow")


def as_format_1(path: pathlib.Path) -> None:
    """Makes a converted file what `convert` wrote before there was a digest of its description."""
    from scalejax.data.tables import arrow

    with pa.OSFile(str(path)) as file:
        old = pa.ipc.open_file(file)
        batches = [old.get_batch_with_custom_metadata(b) for b in range(old.num_record_batches)]
        metadata = json.loads(old.schema.metadata[arrow._KEY]) | {"format": 1}
        schema = old.schema.with_metadata({arrow._KEY: json.dumps(metadata)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch, about in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata), custom_metadata=about)


def _read_arrow(folder: pathlib.Path) -> str:
    from scalejax.data.tables.arrow import ArrowData

    return _of_data(ArrowData(path=str(folder / "rows.arrow")).build())


def _read_arrow_unverified(folder: pathlib.Path) -> str:
    from scalejax.data.tables.arrow import ArrowData

    return _of_data(ArrowData(path=str(folder / "rows.arrow"), verify="nothing").build())


def _write_parquet(folder: pathlib.Path) -> None:
    columns = _columns()
    tags = pa.ListArray.from_arrays(pa.array(columns["tag"].offsets, pa.int32()), pa.array(columns["tag"].values))
    table = pa.table({**columns, "tag": tags})
    pq.write_table(table, folder / "rows.parquet", row_group_size=40, write_page_checksum=True)


def _read_parquet(folder: pathlib.Path) -> str:
    from scalejax.data.tables.parquet import ParquetData

    path = str(folder / "rows.parquet")
    return _of_data(ParquetData(path=path, categorical=_features(), dense=("x",)).build())


def _graph() -> Any:
    from scalejax.data.graphs import Adjacency, NodeGraph

    rng = np.random.default_rng(0)
    edges = Adjacency.from_edges(rng.integers(0, 20, 60), rng.integers(0, 20, 60), shape=(20, 20), values=np.ones(60))
    features, labels = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 4, 20).astype(np.int32)
    return NodeGraph(edges, features, labels, {"train": np.arange(9), "test": np.arange(9, 20)})


def _write_npz(folder: pathlib.Path) -> None:
    from scalejax.data.graphs import write_npz

    write_npz(folder / "graph.npz", _graph())


def _read_npz(folder: pathlib.Path) -> str:
    from scalejax.data.graphs import read_npz

    return read_npz(folder / "graph.npz").fingerprint()


def _write_edges(folder: pathlib.Path) -> None:
    a = _graph().adjacency
    lines = [f"{s} {r} {w}" for s, r, w in zip(a.indices, a.rows, a.weights(), strict=True)]
    (folder / "edges.txt").write_text("# source destination weight\n" + "\n".join(lines))


def _read_edges(folder: pathlib.Path) -> str:
    from scalejax.data.graphs import read_edge_list

    (file,) = folder.iterdir()
    a = read_edge_list(file)
    return _digest(a.indptr, a.indices, a.values, a.shape)


def _write_packed_edges(folder: pathlib.Path) -> None:
    _write_edges(folder)
    text = (folder / "edges.txt").read_bytes()
    (folder / "edges.txt").unlink()
    (folder / "edges.txt.gz").write_bytes(gzip.compress(text, mtime=0))


def _write_ogb(folder: pathlib.Path) -> None:
    graph = _graph()
    a = graph.adjacency
    for inner in ("raw", "split/time"):
        (folder / inner).mkdir(parents=True)

    def write(name: str, table: np.ndarray) -> None:
        text = "\n".join(",".join(str(number) for number in row) for row in table.tolist()) + "\n"
        (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0))

    write("raw/edge.csv.gz", np.stack([a.indices, a.rows], axis=1))
    write("raw/num-node-list.csv.gz", np.array([[20]]))
    write("raw/num-edge-list.csv.gz", np.array([[60]]))
    write("raw/node-feat.csv.gz", graph.features)
    write("raw/node-label.csv.gz", graph.labels[:, None])
    for theirs, nodes in (("train", np.arange(9)), ("valid", np.arange(9, 12)), ("test", np.arange(12, 20))):
        write(f"split/time/{theirs}.csv.gz", nodes[:, None])


def _read_ogb(folder: pathlib.Path) -> str:
    from scalejax.data.graphs import read_ogb

    return read_ogb(folder, edges="both-ways").fingerprint()


def _write_jsonl(folder: pathlib.Path) -> None:
    lines = [json.dumps({"text": f"document {i} \N{SNOWMAN}", "n": [i, {"a": None}]}) for i in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines))


def _read_jsonl(folder: pathlib.Path) -> str:
    from scalejax.data.text.sources import find_texts, read_documents

    (file,) = find_texts(str(folder), (".jsonl",))
    return _digest(*((piece.text, piece.last) for piece in read_documents(file, "text")))


def _write_corpus(folder: pathlib.Path) -> None:
    from scalejax.data.text.corpus import tokenised
    from scalejax.data.text.sources import find_texts
    from scalejax.data.text.tokenizer import ByteTokenizer

    with tempfile.TemporaryDirectory() as name:
        (pathlib.Path(name) / "a.txt").write_text("some text of a corpus")
        kept = pathlib.Path(name) / "kept"
        tokenised(find_texts(name, (".txt",)), ByteTokenizer().build(), folder=kept, progress=lambda *_: None)
        (made,) = kept.iterdir()
        for file in made.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


def _read_corpus(folder: pathlib.Path) -> str:
    from scalejax.data.text.corpus import open_corpus

    corpus = open_corpus(folder)
    return _digest(corpus.tokens, corpus.offsets, corpus.hashes, corpus.vocabulary)


def _write_criteo(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        [str(rng.integers(2)), *map(str, rng.integers(0, 99, 13)), *(f"{n:08x}" for n in rng.integers(0, 2**32, 26))]
        for _ in range(20)
    ]
    text = "".join("\t".join(row) + "\n" for row in rows)
    (folder / "train.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def _read_criteo(folder: pathlib.Path) -> str:
    from scalejax.data.click_logs.criteo import read_text

    lines = list(read_text([folder / "train.txt.gz"]))
    return _digest(*itertools.chain.from_iterable(vars(part).items() for part in lines))


def _write_safetensors(folder: pathlib.Path) -> None:
    from scalejax.models.llm import safetensors

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.int8), "c": np.float32(3)}
    written = tuple(safetensors.Written(name, array.dtype, array.shape) for name, array in tensors.items())
    safetensors.write_folder(folder, written, lambda name: np.asarray(tensors[name]))


def _read_safetensors(folder: pathlib.Path) -> str:
    from scalejax.models.llm import safetensors

    found = safetensors.open_folder(folder)
    known = {name: tensor for name, tensor in found.items() if tensor.kind in safetensors.STORED}
    return _digest(*(part for name, tensor in sorted(known.items()) for part in (name, tensor.read())))


def _write_shards(folder: pathlib.Path) -> None:
    from scalejax.models.llm import safetensors

    written = tuple(safetensors.Written(name, np.dtype(np.float32), (4,)) for name in "abc")
    safetensors.write_folder(folder, written, lambda name: np.ones(4, np.float32), shard_bytes=20)


def _write_plan(folder: pathlib.Path) -> None:
    from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan

    tables = (TablePlan(table="user", kind="row_wise"), TablePlan(table="item", kind="table_wise"))
    ShardingPlan(tables=tables, devices=4).save(folder / "plan.json")


def _read_plan(folder: pathlib.Path) -> str:
    from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan

    return _digest(ShardingPlan.load(folder / "plan.json"))


def _write_towers(folder: pathlib.Path) -> None:
    from scalejax.parallel.towers import Partition

    Partition(towers=(("user", "country"), ("item",))).save(folder / "towers.json")


def _read_towers(folder: pathlib.Path) -> str:
    from scalejax.parallel.towers import Partition

    return _digest(Partition.load(folder / "towers.json"))


def _write_checkpoint(folder: pathlib.Path) -> None:
    from scalejax.parallel.embedding.stored.tracking import TableRows
    from scalejax.train.checkpoints import manifest, rows_file

    step = folder / "7"
    leaves = {"rows": ((0, 4), np.ones((3, 4), np.float32))}
    rows_file.write(step, 0, [TableRows("user", np.arange(3), leaves)])
    manifest.write(
        step,
        manifest.Manifest(
            step=7,
            identity={"recipe": "a"},
            metrics=None,
            host={"examples": 3},
            arrays={},
            files=manifest.digests(step),
        ),
    )


def _read_checkpoint(folder: pathlib.Path) -> str:
    from scalejax.train.checkpoints import chain, manifest, rows_file

    (found,) = chain.chain_to(folder, 7)
    manifest.check_files(folder / "7", found.files)
    blocks = [(block.table, block.numbers.tolist(), repr(block.leaves)) for block in rows_file.read(folder / "7")]
    return _digest(found, blocks)


READERS = {
    "arrow": Reader(_write_arrow, "rows.arrow", _read_arrow, checked=True),
    "arrow-unverified": Reader(_write_arrow, "rows.arrow", _read_arrow_unverified),
    "arrow-format-1": Reader(_write_arrow_of_format_1, "rows.arrow", _read_arrow),
    "parquet": Reader(_write_parquet, "rows.parquet", _read_parquet),
    "npz": Reader(_write_npz, "graph.npz", _read_npz, checked=True),
    "edges": Reader(_write_edges, "edges.txt", _read_edges),
    "edges-gz": Reader(_write_packed_edges, "edges.txt.gz", _read_edges),
    "ogb": Reader(_write_ogb, "raw/node-label.csv.gz", _read_ogb),
    "jsonl": Reader(_write_jsonl, "text.jsonl", _read_jsonl),
    "corpus": Reader(_write_corpus, "about", _read_corpus, checked=True),
    "criteo": Reader(_write_criteo, "train.txt.gz", _read_criteo),
    "safetensors": Reader(_write_safetensors, "model.safetensors", _read_safetensors),
    "shards": Reader(_write_shards, "model.safetensors.index.json", _read_safetensors),
    "plan": Reader(_write_plan, "plan.json", _read_plan),
    "towers": Reader(_write_towers, "towers.json", _read_towers),
    "manifest": Reader(_write_checkpoint, "7/manifest.json", _read_checkpoint, checked=True),
    "rows": Reader(_write_checkpoint, "7/rows/00000.json", _read_checkpoint, checked=True),
}
