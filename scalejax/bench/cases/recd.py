"""Deduplication end to end: from a session log in Parquet to training steps, against the same without it.

Ours reads a log clustered by session that leaves repeats out, transforms and packs the rows of lists that it has, and
trains on deduplicated batches. The peer "plain" is this library on the log as it was written, in time order: every list
of every row. Both train one DLRM on 16 user-side features in four groups (lists of 30 ids on average, pooled) and 4
item-side ones. A unit is one batch.

  read    a row group from Parquet: decoded, ids hashed into rows, packed into the device form, ids sorted by row
  step    a training step on batches that lie on the device
  train   both, batches prepared by a thread ahead of the step

Both files have one codec, one encoding and row groups of one batch; `recd_data` measures storage at the size of row
groups that files have.

A case "read-s16-d0.9" has S = 16 samples a session and d = 0.9; S = 1 is the overhead where nothing repeats.
"""

import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import machine, training_step
from scalejax.bench.harness import Contest, Effort, OutputsDiffer
from scalejax.data.examples.dedup import AnyBatch, DedupBatch, Groups, expand_batch
from scalejax.data.examples.encode import DenseTransform
from scalejax.data.examples.records import RecordLayout
from scalejax.data.examples.row_transforms import HashIds
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.data.tables.parquet_files import ParquetFiles, RowGroup
from scalejax.data.tables.windows import decode
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.fsdp import Fsdp
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Gradients, Tables
from scalejax.train.runs import binding
from scalejax.train.state import TrainState
from scalejax.train.task import Placed

_SETTINGS = ((1, 0.0), (4, 0.0), (4, 0.5), (4, 0.9), (16, 0.0), (16, 0.5), (16, 0.8), (16, 0.9))
CASES = tuple(
    f"{part}-s{samples}-d{repeat:g}" for samples, repeat in reversed(_SETTINGS) for part in ("read", "step", "train")
)
PEERS = ("plain",)
EFFORT = Effort(turns=7)

BATCH = 4096
_TABLE_ROWS = 100_000
_USER_IDS = 30.0
_MODEL = DlrmConfig(dim=32, bottom_hidden=(64,), top_hidden=(256, 128))
_ROOM = 1.15
"""Room for distinct rows and for ids, over what is expected."""


def prepare(case: str, against: str | None, batches: int = 8, batch_size: int = BATCH) -> Contest:
    """The contest of a case over a log of `batches` batches."""
    from scalejax.data.sessions.clustering import cluster_by_session

    part, samples, repeat = case.split("-")
    log = _log(int(samples[1:]), float(repeat[1:]), batches * batch_size)
    held = tempfile.TemporaryDirectory(prefix="scalejax-bench-")
    folder = pathlib.Path(held.name)
    log.write(folder / "log.parquet", row_group=batch_size, encoding="dictionary")
    manifest = cluster_by_session(folder / "log.parquet", folder / "clustered", row_group=batch_size, groups=log.groups)
    sides = {
        "dedup": _Side(log, ParquetFiles(folder / "clustered"), batch_size, log.groups),
        "plain": _Side(log, ParquetFiles(folder / "log.parquet"), batch_size, ()),
    }
    ours, peer = sides["dedup"], sides["plain"]

    def check() -> None:
        group = ours.files.groups[0]
        batch, again = ours.read(group), expand_batch(peer.read(group, ours.files))
        if not isinstance(batch, DedupBatch):
            raise OutputsDiffer("the batch is not deduplicated")
        back = expand_batch(batch).features
        if not (
            np.array_equal(back.values, again.features.values) and np.array_equal(back.lengths, again.features.lengths)
        ):
            raise OutputsDiffer(f"{group.where}: the deduplicated batch does not expand to the plain one")
        features = convert.to_device(batch, ours.program).features
        if features is None or features.inverse is None:
            raise OutputsDiffer("a batch has more distinct rows than there is room for")
        one, other = ours.logits(batch), peer.logits(expand_batch(batch))
        if not np.array_equal(one, other):
            raise OutputsDiffer(f"logits differ by {np.abs(one - other).max():.1e}; equal bits are wanted")

    def figures() -> dict[str, float]:
        first = ours.read(ours.files.groups[0])
        assert isinstance(first, DedupBatch)
        moved = {name: _nbytes(side.device_batches()[0]) for name, side in sides.items()}
        return {
            "factor": float(np.mean(first.features.factors)),
            "closed_form": dedup_factor(log.samples, log.repeat),
            "file_ratio": manifest.source_bytes / manifest.bytes,
            "to_device_ratio": moved["plain"] / moved["dedup"],
            "temp_ratio": peer.temporaries() / ours.temporaries(),
        }

    run = {"read": _Side.reads, "step": _Side.steps, "train": _Side.trains}[part]
    return Contest(
        ours=functools.partial(run, ours),
        peer=None if against is None else functools.partial(run, peer),
        check=check,
        examples=batch_size,
        device=machine.device_name(jax.devices()[0]),
        close=held.cleanup,
        figures=figures,
    )


class _Side:
    """One way from the log to the step."""

    def __init__(self, log: SessionLog, files: ParquetFiles, batch_size: int, groups: Groups) -> None:
        self.files = files
        schema = Schema(
            categorical=tuple(
                Categorical(
                    name=name,
                    rows=_TABLE_ROWS,
                    length=None,
                    capacity=_ROOM * (log.item_ids if name in log.item_names else log.user_ids),
                )
                for name in log.names
            ),
            dense=log.dense_names,
        )
        share = min(1.0, _ROOM / dedup_factor(log.samples, log.repeat))
        experiment = Experiment(
            model=_MODEL,
            data=training_step.Given(batch_size=batch_size),
            steps=1_000_000,
            optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-3)),
            strategy=Fsdp(sharding="NO_SHARD"),
            tables=Tables(
                optimizer=RowwiseAdagrad(learning_rate=0.002),
                dedup=tuple(DedupGroup(features=names, rows_per_example=share) for names in groups),
            ),
            gradients=Gradients(microbatch="cache"),
        )
        self.program = binding.bind(experiment, schema, meshes.make_mesh(experiment.placement.mesh, jax.devices()[:1]))
        self._layout = RecordLayout(schema, groups)
        self._transforms = [(name, HashIds(rows=_TABLE_ROWS, seed=f)) for f, name in enumerate(log.names)]

    @functools.cached_property
    def _state(self) -> list[TrainState]:
        return [self.program.init()]  # a list, because steps give their state away

    @functools.lru_cache(maxsize=1)  # noqa: B019  one side lives as long as its contest
    def device_batches(self) -> list[Placed]:
        """Four batches on the device."""
        return [convert.to_device(self.read(group), self.program) for group in self.files.groups[:4]]

    @functools.cached_property
    def _turn(self) -> Iterator[Placed]:
        return itertools.cycle(self.device_batches())

    @functools.cached_property
    def _groups(self) -> Iterator[RowGroup]:
        return itertools.cycle(self.files.groups)

    def read(self, group: RowGroup, files: ParquetFiles | None = None) -> AnyBatch:
        """A row group as a batch, as a data set in windows reads it."""
        rows = decode(files or self.files, group, self._layout, DenseTransform(), self._transforms)
        return self._layout.batch(rows, group.rows)

    def reads(self, count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(convert.to_device(self.read(next(self._groups)), self.program))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step(next(self._turn))
        jax.block_until_ready(self._state[0])

    def trains(self, count: int) -> None:
        batches = (self.read(next(self._groups)) for _ in range(count))
        with convert.prefetch(batches, self.program) as ready:
            for _, batch in ready:
                self._step(batch)
        jax.block_until_ready(self._state[0])

    def logits(self, batch: AnyBatch) -> np.ndarray:
        device = convert.to_device(batch, self.program, "scoring")
        logits = self.program.eval_step(self.program.init(), device).outputs["logits"]
        return np.asarray(logits)

    def temporaries(self) -> int:
        """Bytes that a step takes on top of its arguments and results."""
        traced = self.program.train_step.trace(self._state[0], self.device_batches()[0])
        analysis = traced.lower().compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    def _step(self, batch: Placed) -> None:
        self._state[0], _ = self.program.train_step(self._state[0], batch)


def _log(samples: int, repeat: float, rows: int) -> SessionLog:
    return SessionLog(
        sessions=rows // samples,
        samples=samples,
        repeat=repeat,
        user_groups=(4, 4, 4, 4),
        user_ids=_USER_IDS,
        item_features=4,
        item_ids=2.0,
        rows=1_000_000,
        concurrent=max(1.0, rows / samples / 4),
    )


def _nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
