"""Run folders of scalejax before its three kinds of experiment became one: what they recorded, as it is called now.

Such a folder is read as any other: its overrides and its recorded data are brought to the fields of now, and then the
recipe is run again and compared (`serialization.reload`). It is not trained further, see `RunFolder.resume_step`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scalejax.configs.as_data import Record

_RENAMED = {"tables.exchange.spill": "tables.exchange.overflow", "exchange.spill": "tables.exchange.overflow"}
"""Of records since then, too."""

_MOVED = _RENAMED | {
    "mesh": "placement.mesh",
    "rules": "placement.rules",
    "offload": "placement.offload",
    "row_optimizer": "tables.optimizer",
    "row_schedule": "tables.schedule",
    "exchange": "tables.exchange",
    "sharding": "tables.sharding",
    "accumulate": "tables.accumulate",
    "id_maps": "tables.id_maps",
    "dedup": "tables.dedup",
    "pipeline": "tables.pipeline",
    "precision.tables": "tables.dtype",
    "checkpoints.full_every": "tables.full_every",
    "clip": "gradients.clip",
    "microbatch": "gradients.microbatch",
    "loss_scaling": "gradients.loss_scaling",
    "eval_every": "evaluation.every",
    "eval_split": "evaluation.split",
    "final_split": "evaluation.final_split",
    "validation": "evaluation.validation",
}
_FIRST_METRICS = {"Experiment": ("logloss",), "DenseExperiment": ("loss",), "GraphExperiment": ("accuracy", "auc")}


def path(given: str) -> str:
    """A path of `--set` as it is called now; the same where it has not moved."""
    for old, new in _MOVED.items():
        if given == old or given.startswith(f"{old}."):
            return new + given.removeprefix(old)
    return given


def renamed(recorded: Record) -> Record:
    """What `serialization.record` wrote since then, with fields that have been renamed as they are called now."""
    parts = [text.partition("=") for text in recorded["sets"]]
    sets = [f"{_RENAMED.get(given.strip(), given)}={value}" if equals else given for given, equals, value in parts]
    return {**recorded, "sets": sets, "experiment": _with_new_names(recorded["experiment"])}


def _with_new_names(data: Any) -> Any:
    if isinstance(data, list):
        return [_with_new_names(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = str(data.get("type")).rpartition(".")[2].lower()  # the name of the field that holds one
    fields = {_new_name(kind, str(name)): _with_new_names(value) for name, value in data["fields"].items()}
    return {**data, "fields": fields}


def _new_name(kind: str, name: str) -> str:
    if kind == "dict":  # what a phase changes: whole paths
        return _RENAMED.get(name, name)
    found = _RENAMED.get(f"{kind}.{name}")
    return name if found is None else found.rpartition(".")[2]


def as_now(recorded: Record) -> Record:
    """What `serialization.record` wrote then, with overrides and experiment as it writes them now; itself if it did."""
    from scalejax.train.run_folder import is_earlier

    if not is_earlier(recorded):
        return recorded
    data: Any = recorded["experiment"]
    sets = recorded["sets"]
    kind = data["type"].rpartition(".")[2]
    return {**recorded, "sets": [_set(text, kind) for text in sets], "experiment": _experiment(data, kind, sets)}


def _set(text: str, kind: str) -> str:
    given, _, value = (part.strip() for part in text.partition("="))
    # What a model with tables had as none; of others none is all.
    if given == "microbatch" and kind == "Experiment" and value.lower() == "none":
        value = "cache"
    return f"{path(given)}={value}"


def _experiment(data: Mapping[str, Any], kind: str, sets: Sequence[str]) -> dict[str, Any]:
    from scalejax.configs.as_data import to_data
    from scalejax.parallel.fsdp import Fsdp
    from scalejax.train.experiment import Evaluation, Gradients, Placement, Tables

    defaults = {
        "strategy": Fsdp(sharding="NO_SHARD") if kind == "Experiment" else Fsdp(),
        "tables": Tables(),
        "gradients": Gradients(),
        "placement": Placement(),
        "quantization": (),
        "evaluation": Evaluation(final="best" if kind == "GraphExperiment" else "end"),
        "xla_flags": (),
    }
    fields: dict[str, Any] = {name: to_data(value) for name, value in defaults.items()}
    for name, value in data["fields"].items():
        within = {"precision": "tables", "checkpoints": "full_every"}.get(name, "")
        if within:
            rest = {field: inner for field, inner in value["fields"].items() if field != within}
            _put(fields, f"{name}.{within}", value["fields"].get(within))
            value = {**value, "fields": rest}
        _put(fields, name, value)
    gradients, checkpoints = fields["gradients"]["fields"], fields["checkpoints"]["fields"]
    if kind == "Experiment" and gradients["microbatch"] is None:
        gradients["microbatch"] = "cache"
    chosen = any(text.partition("=")[0].strip() == "checkpoints.best_metric" for text in sets)
    if not chosen and checkpoints["best_metric"] in _FIRST_METRICS[kind]:
        checkpoints["best_metric"] = None
    return {"type": "scalejax.train.experiment.Experiment", "fields": fields}


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    group, _, field = path(name).partition(".")
    if field:
        fields[group]["fields"][field] = value
    else:
        fields[group] = value
