"""Accuracy and time of sampled inference over its width: GCNs trained on every edge, asked with S edges a node.

    python benchmarks/graph_width.py [--citeseer citeseer.npz] [--json FILE] > benchmarks/results/graph_width.md
    python benchmarks/graph_width.py --citeseer citeseer.npz --others 16

Graphs: the 40 nearest neighbours of scikit-learn's digits (100 labelled nodes a seed, mean of neighbours), the bundled
Cora, and Citeseer where its npz is given. A row is one width and strategy; accuracy is the mean over seeds, and time
that of a pass of the model over the graph, as a ratio to the exact pass beside it: passes alternate, and of each kind
the time is taken that a tenth of them beat, since what else runs on the machine makes passes slower and never faster.
`--scores` takes accuracies from an earlier `--json` and only times.

`--others` instead trains the GCNs of the citations with so many seeds, here, in NumPy, and where it is installed in
PyTorch Geometric: the same graph, model, optimizer and way of choosing the epoch, and other random numbers.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.sparse
import scipy.special

from scalejax import configs, optim
from scalejax.data import graphs
from scalejax.models.graph import GcnConfig, Sampling, presampled
from scalejax.parallel.mesh import make_mesh
from scalejax.train.batches.convert import to_device
from scalejax.train.experiment import Experiment, Placement
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.runs import binding

STRATEGIES = ("bucket", "fastrand")


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph, how it is learnt, and how many seeds.

    Attributes:
      name: Of the graph.
      experiment: The run.
      data: Seed -> the data; the graph is the same for all.
      seeds: Of parameters, dropout and, of digits, labelled nodes.
      widths: S.
    """

    name: str
    experiment: Experiment
    data: Callable[[int], graphs.NodeDataSet]
    seeds: Sequence[int]
    widths: Sequence[int]


def digits(neighbors: int = 40, labelled: int = 100) -> Callable[[int], graphs.NodeDataSet]:
    """Seed -> 1,797 images of digits, each the mean of its neighbours, some of them labelled."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    adjacency = graphs.knn(images, neighbors).with_self_loops().normalized("right")
    features = (images / 16).astype(np.float32)

    def of_seed(seed: int) -> graphs.NodeDataSet:
        order = np.random.RandomState(seed).permutation(classes.size)
        rest = np.sort(order[labelled:])
        splits = {"train": np.sort(order[:labelled]), "validation": rest, "test": rest}
        return graphs.NodeDataSet(graphs.NodeGraph(adjacency, features, classes.astype(np.int32), splits))

    return of_seed


def digits_experiment() -> Experiment:
    """A GCN of two layers and 64 hidden units."""
    return Experiment(
        model=GcnConfig(hidden=64, dropout=0.5),
        data=graphs.NodeData(),
        steps=200,
        optimizer=optim.AdamL2(learning_rate=optim.Constant(value=0.01)),
        placement=Placement(mesh=None),
    )


class Trainer:
    """Trains one experiment with several seeds through the same compiled functions."""

    def __init__(self, experiment: Experiment, data: graphs.NodeDataSet) -> None:
        self.program = binding.bind(experiment, data.schema, make_mesh(None), data)

    def fit(self, seed: int, data: graphs.NodeDataSet) -> tuple[Any, float]:
        """(state after the last step, test accuracy at the best validation accuracy)."""
        experiment = dataclasses.replace(self.program.experiment, seed=seed)
        state = dataclasses.replace(self.program, experiment=experiment).init()
        batch = to_device(data.whole("train"), self.program)
        best = (-1.0, 0.0)
        for _ in range(experiment.steps):
            state, _ = self.program.train_step(state, batch)
            found = tuple(self.accuracy(state, data, split) for split in ("validation", "test"))
            best = max(best, found, key=lambda pair: pair[0])
        return state, best[1]

    def accuracy(self, state: Any, data: graphs.NodeDataSet, split: str, placed: Any = None) -> float:
        """Of a split, over what `placed` reads; None = what the program does."""
        batch = to_device(data.whole(split), self.program)
        if placed is not None:
            batch = dataclasses.replace(batch, constants=placed)
        scored = self.program.eval_step(state, batch)
        name, metric = next(iter(self.program.metrics.items()))
        return metric.compute(metric_sums.to_host(scored.metrics[name]))["accuracy"]


def run(case: Case, repeats: int, known: dict[str, Any] | None) -> dict[str, Any]:
    """The table of one graph; `known` = what this gave before, whose accuracies are taken."""
    first = case.data(case.seeds[0])
    trainer = Trainer(case.experiment, first)
    adjacency, exact = first.graph.adjacency, trainer.program.constants
    placed = {
        (width, strategy): dataclasses.replace(
            exact, score=presampled(adjacency, Sampling(width=width, strategy=strategy))
        )
        for width in case.widths
        for strategy in STRATEGIES
    }
    scores: dict[Any, list[float]] = {key: [] for key in ("exact", "best", *placed)}
    if known is not None:
        scores = {key: known[key] for key in ("exact", "best")}
        scores |= {(width, strategy): known["scores"][f"{width} {strategy}"] for width, strategy in placed}
    state = trainer.program.init()
    for seed in case.seeds if known is None else ():
        data = case.data(seed)
        state, best = trainer.fit(seed, data)
        scores["best"].append(best)
        scores["exact"].append(trainer.accuracy(state, data, "test", exact))
        for key, sampled in placed.items():
            scores[key].append(trainer.accuracy(state, data, "test", sampled))
    task: Any = trainer.program.task
    pass_ = jax.jit(lambda state, placed: task.logits(_model(trainer, state), placed))
    rows = [
        {
            "graph": case.name,
            "width": width,
            "strategy": strategy,
            "edges": float(np.minimum(adjacency.degrees, width).sum() / adjacency.num_edges),
            "accuracy": statistics.mean(scores[width, strategy]),
            "lost": statistics.mean(scores["exact"]) - statistics.mean(scores[width, strategy]),
            "faster": _ratio(pass_, state, exact, placed[width, strategy], repeats),
        }
        for width, strategy in placed
    ]
    return {
        "graph": case.name,
        "nodes": adjacency.shape[0],
        "edges": adjacency.num_edges,
        "most": int(adjacency.degrees.max()),
        "seeds": list(case.seeds),
        "exact": scores["exact"],
        "best": scores["best"],
        "scores": {f"{width} {strategy}": scores[width, strategy] for width, strategy in placed},
        "rows": rows,
    }


def _model(trainer: Trainer, state: Any) -> Any:
    return trainer.program.model.merge(state.params)


def _ratio(pass_: Any, state: Any, exact: Any, sampled: Any, repeats: int) -> float:
    """Time of the exact pass over that of the sampled one, both in turn, each the first decile."""
    times: tuple[list[float], list[float]] = ([], [])
    for placed in (exact, sampled):
        pass_(state, placed).block_until_ready()
    for _ in range(repeats):
        for placed, taken in zip((exact, sampled), times, strict=True):
            start = time.perf_counter()
            pass_(state, placed).block_until_ready()
            taken.append(time.perf_counter() - start)
    return float(np.quantile(times[0], 0.1) / np.quantile(times[1], 0.1))


def geometric(experiment: Any, data: graphs.NodeDataSet, seed: int) -> float:
    """Test accuracy of PyTorch Geometric's GCN at its best validation accuracy."""
    import torch
    from torch.nn import functional
    from torch_geometric.nn import GCNConv

    torch.manual_seed(seed)
    graph, rate, hidden = data.graph, experiment.model.dropout, experiment.model.hidden
    x, y = torch.tensor(graph.features), torch.tensor(graph.labels).long()
    plain = graph.adjacency.without_self_loops()  # their layer adds loops and normalises itself
    edges = torch.tensor(np.stack([plain.indices, plain.rows]))
    rows = {split: torch.tensor(nodes) for split, nodes in graph.splits.items()}
    first, second = GCNConv(x.shape[1], hidden, cached=True), GCNConv(hidden, graph.num_classes, cached=True)
    groups = [{"params": first.parameters(), "weight_decay": experiment.optimizer.l2}, {"params": second.parameters()}]
    optimizer = torch.optim.Adam(groups, lr=experiment.optimizer.learning_rate.value)

    def logits(training: bool) -> Any:
        h = first(functional.dropout(x, rate, training), edges).relu()
        return second(functional.dropout(h, rate, training), edges)

    best = (-1.0, 0.0)
    for _ in range(experiment.steps):
        optimizer.zero_grad()
        functional.cross_entropy(logits(True)[rows["train"]], y[rows["train"]]).backward()
        optimizer.step()
        with torch.no_grad():
            right = logits(False).argmax(1) == y
        found = tuple(right[rows[split]].float().mean().item() for split in ("validation", "test"))
        best = max(best, found, key=lambda pair: pair[0])
    return best[1]


def plain(experiment: Any, data: graphs.NodeDataSet, seed: int) -> float:
    """The same of that training written in NumPy, where dropout and products see the words that there are alone."""
    graph, random = data.graph, np.random.default_rng(seed)
    edges, hidden, classes = graph.adjacency, experiment.model.hidden, graph.num_classes
    a = scipy.sparse.csr_array((edges.weights(), edges.indices, edges.indptr), shape=edges.shape)
    x, y, rows = scipy.sparse.csr_array(graph.features), np.asarray(graph.labels), graph.splits
    train, rate = rows["train"], experiment.optimizer.learning_rate.value

    def glorot(*shape: int) -> np.ndarray:
        return random.uniform(-1, 1, shape).astype(np.float32) * np.float32((6 / sum(shape)) ** 0.5)

    def keep(*shape: int) -> np.ndarray:
        share = 1 - experiment.model.dropout
        return ((random.random(shape) < share) / share).astype(np.float32)

    biases = [np.zeros(width, np.float32) for width in (hidden, classes)]
    params = [glorot(x.shape[1], hidden), biases[0], glorot(hidden, classes), biases[1]]
    first, second = ([np.zeros_like(p) for p in params] for _ in range(2))
    dropped, best = x.copy(), (-1.0, 0.0)
    for step in range(1, experiment.steps + 1):
        w1, b1, w2, b2 = params
        dropped.data = x.data * keep(x.nnz)
        inner = a @ (dropped @ w1) + b1
        kept = keep(*inner.shape)
        h = np.maximum(inner, 0) * kept
        d_logits = np.zeros((y.size, classes), np.float32)
        d_logits[train] = scipy.special.softmax((a @ (h @ w2) + b2)[train], axis=1)
        d_logits[train, y[train]] -= 1
        d_logits /= train.size
        back = a.T @ d_logits
        d_inner = (back @ w2.T) * kept * (inner > 0)
        grads = [dropped.T @ (a.T @ d_inner), d_inner.sum(0), h.T @ back, d_logits.sum(0)]
        for n, (p, grad) in enumerate(zip(params, grads, strict=True)):
            grad = grad + experiment.optimizer.l2 * p if n < 2 else grad
            first[n] += 0.1 * (grad - first[n])
            second[n] += 0.001 * (grad * grad - second[n])
            p -= rate * (first[n] / (1 - 0.9**step)) / (np.sqrt(second[n] / (1 - 0.999**step)) + 1e-8)
        right = (a @ (np.maximum(a @ (x @ w1) + b1, 0) @ w2) + b2).argmax(1) == y
        best = max(best, tuple(right[rows[s]].mean() for s in ("validation", "test")), key=lambda pair: pair[0])
    return best[1]


def of_others(case: Case, seeds: int) -> list[str]:
    """Rows of a table: the same training here and by others."""
    data = case.data(0)
    trainer = Trainer(case.experiment, data)
    others: dict[str, Callable[[Any, graphs.NodeDataSet, int], float]] = {
        "scalejax": lambda experiment, data, seed: trainer.fit(seed, data)[1],
        "NumPy": plain,
    }
    if importlib.util.find_spec("torch_geometric"):
        others["PyTorch Geometric"] = geometric
    lines = []
    for name, train in others.items():
        scores = [train(case.experiment, data, seed) for seed in range(seeds)]
        mean, deviation = statistics.mean(scores), statistics.stdev(scores)
        spread = f"{mean:.4f} | {deviation:.4f} | {min(scores):.3f} | {max(scores):.3f}"
        lines.append(f"| {case.name} | {name} | {seeds} | {spread} |")
    return lines


def cases(citeseer: pathlib.Path | None) -> list[Case]:
    """Digits, Cora, and Citeseer where it is given."""
    found = [Case("digits, 40 neighbours", digits_experiment(), digits(), range(4), (2, 4, 8, 16, 32, 64, 128))]
    names = {"Cora": ("gcn-cora", None)} | ({"Citeseer": ("gcn-citeseer", citeseer)} if citeseer else {})
    for name, (recipe, path) in names.items():
        experiment: Any = configs.load(recipe, [f"data.path={path}"] if path else [])
        data = experiment.data.build()
        found.append(Case(name, experiment, lambda seed, data=data: data, range(5), (1, 2, 4, 8, 16)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--citeseer", type=pathlib.Path, help="npz of Citeseer; Cora and digits need no file")
    parser.add_argument("--repeats", type=int, default=101, help="passes timed")
    parser.add_argument("--scores", type=pathlib.Path, help="an earlier --json: take its accuracies and only time")
    parser.add_argument("--json", type=pathlib.Path, help="write everything here as well")
    parser.add_argument("--others", type=int, metavar="SEEDS", help="train as others do instead, with so many seeds")
    options = parser.parse_args()
    if options.others:
        print("| graph | by | seeds | test accuracy at best validation | standard deviation | least | most |")
        print("|---|---|---|---|---|---|---|")
        for case in cases(options.citeseer)[1:]:
            print(*of_others(case, options.others), sep="\n", flush=True)
        return
    known = {one["graph"]: one for one in json.loads(options.scores.read_text())} if options.scores else {}
    found = [run(case, options.repeats, known.get(case.name)) for case in cases(options.citeseer)]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(markdown(found))


def markdown(found: list[dict[str, Any]]) -> str:
    """The committed table."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"Date {today}, device {jax.devices()[0].device_kind}, jax {jax.__version__}.", ""]
    lines += ["| graph | nodes | edges | largest degree | seeds | test accuracy, last step | at best validation |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in found:
        exact, best = (" ".join(f"{x:.3f}" for x in one[key]) for key in ("exact", "best"))
        means = [statistics.mean(one[key]) for key in ("exact", "best")]
        lines.append(
            f"| {one['graph']} | {one['nodes']:,} | {one['edges']:,} | {one['most']} | {len(one['seeds'])} | "
            f"{means[0]:.4f} ({exact}) | {means[1]:.4f} ({best}) |"
        )
    lines += ["", "| graph | S | edges read | bucket | fastrand | fastrand loses | bucket faster | fastrand faster |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for one in found:
        by_width: dict[int, dict[str, Any]] = {}
        for row in one["rows"]:
            by_width.setdefault(row["width"], {})[row["strategy"]] = row
        for width, row in by_width.items():
            b, f = row["bucket"], row["fastrand"]
            lines.append(
                f"| {one['graph']} | {width} | {f['edges']:.3f} | {b['accuracy']:.4f} | {f['accuracy']:.4f} | "
                f"{100 * f['lost']:+.2f} pt | {b['faster']:.2f}x | {f['faster']:.2f}x |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
