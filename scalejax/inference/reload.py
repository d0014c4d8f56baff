"""Loads what `scalejax export` wrote and scores with it. Needs jax and numpy, nothing else; copied beside the model.

    import reload                                # this file, from the folder of the model or a copy
    model = reload.load("path/of/the/folder")
    model(ids={"user": [17, 4], "pages": [[3, 9], []]}, dense=[[0.1, 2.0], [0.3, 1.0]])     # a click model
    model([[11, 52, 7], [3]])                                                               # a language model

The first gives {"logits": float32[B, T], "probabilities": float32[B, T]} as NumPy arrays, the second the logits of what
follows the last token of each text, float32[B, V], or every token, float32[B, S, V], as it was exported.
`model.signature` is signature.json: of a click model the features, how many rows each has, the names of the numbers and
of the labels; of a language model its vocabulary.

    model.stablehlo     the program, a portable artifact of StableHLO bytecode
    model.safetensors   tables and parameters, arguments of the program
    signature.json      its arguments in order, inputs, outputs, digests of the other files and of itself

A feature whose "shape" is ["batch", L] takes L ids an example, int[B, L], or int[B] where L is 1; one of shape ["ids"]
takes a list of ids an example.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

FORMAT = "scalejax click model 2"
LANGUAGE_FORMAT = "scalejax language model 2"
Ids = Sequence[npt.ArrayLike] | np.ndarray
_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
}


class _Program:
    """What was exported, with its weights."""

    def __init__(self, signature: dict[str, Any], weights: Mapping[str, np.ndarray], program: bytes) -> None:
        self.signature = signature
        self._weights = [jnp.asarray(weights[name]) for name in signature["weights"]]
        exported = _exported(signature, program)
        self._call = jax.jit(lambda weights, inputs: exported.call(*weights, *inputs))

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name, of inputs as `signature` has them."""
        found = self._call(self._weights, [inputs[name] for name in self.signature["inputs"]])
        return {name: np.asarray(array) for name, array in zip(self.signature["outputs"], found, strict=True)}

    def compiled(self) -> int:
        """Sizes of inputs that were compiled so far."""
        return self._call._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


class TextModel(_Program):
    """A model that scores texts, some at a time."""

    def __call__(self, tokens: Sequence[npt.ArrayLike] | np.ndarray) -> dict[str, np.ndarray]:
        """Scores B texts.

        Args:
          tokens: Ids of each text, at least one and at most as many as `signature["inputs"]["tokens"]` says.

        Returns:
          {"logits": float32[B, V]} of what follows the last token, or float32[B, S, V] of every token where all were
          exported, S those of the longest text; of no meaning behind the end of a shorter one.

        Raises:
          ValueError: there is no text, or one is empty or too long, or an id is no integer or out of range.
        """
        rows, length = self.signature["inputs"]["tokens"]["shape"]
        texts = [np.asarray(text) for text in tokens]
        lengths = np.array([text.size for text in texts], np.int32)
        if not texts or any(text.ndim != 1 for text in texts) or not 1 <= lengths.min() <= lengths.max() <= length:
            raise ValueError(f"tokens: must be lists of 1 to {length} ids, a list for each text; got {lengths} ids.")
        for number, text in enumerate(texts):
            if not np.issubdtype(text.dtype, np.integer):
                raise ValueError(f"tokens: text {number} must have ids that are integers; got {text.dtype}.")
            if not 0 <= text.min() <= text.max() < self.signature["vocabulary"]:
                raise ValueError(
                    f"tokens: text {number} must have ids in [0, {self.signature['vocabulary']}); got {text.min()} to "
                    f"{text.max()}."
                )
        spare = -len(texts) % rows
        padded = np.zeros((len(texts) + spare, length), np.int32)
        for row, text in zip(padded, texts, strict=False):
            row[: text.size] = text
        counts = np.pad(lengths, (0, spare), constant_values=1)
        parts = [
            self.run({"tokens": padded[start : start + rows], "lengths": counts[start : start + rows]})["logits"]
            for start in range(0, len(padded), rows)
        ]
        logits = np.concatenate(parts)[: len(texts)]
        return {"logits": logits[:, : lengths.max()] if logits.ndim == 3 else logits}


class Model(_Program):
    """A click model that scores batches of any size; every new size is compiled once."""

    def __call__(
        self, ids: Mapping[str, Ids], dense: Ids | None = None, lengths: Mapping[str, Ids] | None = None
    ) -> dict[str, np.ndarray]:
        """Scores B examples.

        Args:
          ids: Feature -> its ids, see above; int[N] of all examples together where `lengths` has the feature.
          dense: float[B, D] in the order of signature["dense"]; may be left out where D is 0.
          lengths: Feature -> int[B], ids per example.

        Raises:
          ValueError: a feature is missing or unknown, an id is no integer or out of range, or shapes do not fit.
        """
        inputs = self.inputs(ids, dense, lengths or {})
        return self.run(inputs)

    def inputs(self, ids: Mapping[str, Ids], dense: Ids | None, lengths: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        """Of the program, from the arguments of a call; ids of lists are filled up to a power of two."""
        features: dict[str, dict[str, Any]] = self.signature["features"]
        for name in features.keys() ^ ids.keys():
            what = "is missing" if name in features else "is not known"
            raise ValueError(f"ids: feature {name!r} {what}; the model has {', '.join(features)}.")
        for name in lengths:
            if name not in features or features[name]["length"] is not None:
                raise ValueError(f"lengths: {name!r} is no feature with a list of ids an example; leave it out.")
        found: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        for name, feature in features.items():
            if feature["length"] is None:
                values, counts = _jagged(name, ids[name], lengths.get(name))
                found[f"lengths/{name}"], sizes[name] = counts, len(counts)
            else:
                values = np.asarray(ids[name])
                values = values[:, None] if values.ndim == 1 and feature["length"] == 1 else values
                if values.ndim != 2 or values.shape[1] != feature["length"]:
                    raise ValueError(f"ids: feature {name!r} must be [B, {feature['length']}]; got {values.shape}.")
                sizes[name] = len(values)
            if values.size and not np.issubdtype(values.dtype, np.integer):
                raise ValueError(f"ids: feature {name!r} must have ids that are integers; got {values.dtype}.")
            if values.size and not 0 <= values.min() <= values.max() < feature["rows"]:
                raise ValueError(
                    f"ids: feature {name!r} must have ids in [0, {feature['rows']}); got {values.min()} to "
                    f"{values.max()}."
                )
            if feature["length"] is None:  # a power of two, so that few sizes are compiled
                room = 1 << max(0, int(values.size - 1).bit_length()) if values.size else 1
                values = np.pad(values, (0, room - values.size))
            found[f"ids/{name}"] = values.astype(np.int32)
        size = next(iter(sizes.values()), 0 if dense is None else len(dense))
        width = len(self.signature["dense"])
        numbers = np.zeros((size, 0), np.float32) if dense is None else np.asarray(dense, np.float32)
        if numbers.shape != (size, width) or len(set(sizes.values())) > 1 or not size:
            raise ValueError(
                f"Every input must have one number B >= 1 of examples, and dense {width} columns "
                f"({', '.join(self.signature['dense'])}); got examples {sizes} and dense {list(numbers.shape)}."
            )
        found["dense"] = numbers
        return found


def load(folder: str | pathlib.Path) -> Any:
    """Reads a folder that `scalejax export` wrote: a `Model` of clicks, or a `TextModel`.

    Raises:
      ValueError: a file is not the one that was written, or of a newer format.
      OSError: a file is missing or cannot be read.
    """
    folder = pathlib.Path(folder)
    path = folder / "signature.json"
    try:
        signature = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{path}: is damaged. Copy the folder anew.") from None
    said = str(signature.get("format"))
    kinds = {FORMAT: Model, LANGUAGE_FORMAT: TextModel}
    # Signatures of format 1 have no digest of themselves.
    kind = kinds.get(said) or {f"{name[:-1]}1": kind for name, kind in kinds.items()}.get(said)
    if said in kinds and signature.get("digest") != signature_digest(signature):
        raise ValueError(f"{path}: is damaged. Copy the folder anew.")
    if kind is None:
        known = f"{FORMAT!r} and {LANGUAGE_FORMAT!r}"
        raise ValueError(f"{folder}: has the format {signature.get('format')!r}; this reads {known}.")
    data = {}
    for name, digest in signature["sha256"].items():
        data[name] = (folder / name).read_bytes()
        if hashlib.sha256(data[name]).hexdigest() != digest:
            raise ValueError(f"{folder / name}: is damaged or of another export. Copy the folder anew.")
    return kind(signature, read_safetensors(data["model.safetensors"]), data["model.stablehlo"])


def signature_digest(signature: Mapping[str, Any]) -> str:
    """Of what a signature says, but for its own digest."""
    rest = {name: value for name, value in signature.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Name -> tensor; the arrays share the memory of `data`."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            part = np.frombuffer(data, np.uint8, end - begin, 8 + length + begin)
            found[name] = part.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _jagged(name: str, ids: Ids, lengths: Ids | None) -> tuple[np.ndarray, np.ndarray]:
    if lengths is not None:
        values, counts = np.asarray(ids), np.asarray(lengths)
        whole = counts.ndim == 1 and (not counts.size or np.issubdtype(counts.dtype, np.integer))
        if values.ndim != 1 or not whole or counts.min(initial=0) < 0 or counts.sum() != len(values):
            raise ValueError(f"ids: feature {name!r}: lengths must be integers that add up to the {values.shape} ids.")
        return values, counts.astype(np.int32)
    rows = [np.asarray(some) for some in ids]
    if any(row.ndim != 1 for row in rows):
        raise ValueError(f"ids: feature {name!r} must be a list of ids for each example, such as [[3, 9], []].")
    counts = np.array([len(row) for row in rows], np.int32)
    filled = [row for row in rows if len(row)]  # NumPy takes an empty list for one of floats
    return np.concatenate(filled) if filled else np.zeros(0, np.int64), counts


def _exported(signature: dict[str, Any], program: bytes) -> jax.export.Exported:
    """The program as jax knows it. `jax.export.deserialize` would want a package that jax does not depend on."""
    scope = jax.export.SymbolicScope()

    def abstract(entry: dict[str, Any]) -> jax.core.ShapedArray:
        text = ",".join(map(str, entry["shape"]))
        shape = jax.export.symbolic_shape(text, scope=scope) if text else ()
        return jax.core.ShapedArray(shape, np.dtype(entry["dtype"]))

    ins = [*signature["weights"].values(), *signature["inputs"].values()]
    outs = list(signature["outputs"].values())
    calling = signature["calling"]
    values = {
        "fun_name": "score",
        "in_tree": jax.tree.structure(((0,) * len(ins), {})),
        "in_avals": tuple(map(abstract, ins)),
        "out_tree": jax.tree.structure((0,) * len(outs)),
        "out_avals": tuple(map(abstract, outs)),
        "_has_named_shardings": True,
        "_in_named_shardings": (None,) * len(ins),
        "_out_named_shardings": (None,) * len(outs),
        "in_shardings_hlo": (None,) * len(ins),
        "out_shardings_hlo": (None,) * len(outs),
        "nr_devices": 1,
        "platforms": tuple(calling["platforms"]),
        "ordered_effects": (),
        "unordered_effects": (),
        "disabled_safety_checks": (),
        "mlir_module_serialized": program,
        "calling_convention_version": calling["version"],
        "module_kept_var_idx": tuple(calling["kept"]),
        "uses_global_constants": calling["uses_global_constants"],
        "_get_vjp": None,
    }
    fields = {field.name for field in dataclasses.fields(jax.export.Exported)}
    if fields - values.keys():
        raise ValueError(
            f"jax {jax.__version__} describes programs by {', '.join(sorted(fields - values.keys()))}, which this file "
            f"does not know. Export anew, or use jax {signature['jax']}."
        )
    return jax.export.Exported(**{name: value for name, value in values.items() if name in fields})
