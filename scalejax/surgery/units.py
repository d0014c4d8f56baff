"""Hidden units of MLPs, which may leave a click model and come back while it is trained.

Unit j of a hidden layer is column j of the matrix in, W, entry j of the bias, and row j of the matrix out, V; in a run
also their moments, counts of steps and averages. Nothing else touches it, so that the units of one layer do not hang on
those of another: `hidden_layers` finds them in any model whose MLPs are `nn.Mlp`, by the names of its parameters,
"PATH/layers/0/kernel", "PATH/layers/0/bias", "PATH/layers/1/kernel" and so on. MLPs whose parameters are stacked, as
those of the modules of towers, keep their units.

    norm score      ||W[:, j]||_2 ||V[j, :]||_2         the same if W[:, j] and b[j] are c times and V[j, :] 1/c times
    Taylor score    sum_w w^2 mean((dL/dw)^2)           over the weights w of W[:, j], b[j] and V[j, :]: to first order
                                                        the squares of what a batch loses without each of them

The mean of the Taylor score is that of the optimizer: Adam's second moments, corrected for their bias, so that a phase
needs no further pass over data. The form is that of P. Molchanov et al., "Importance Estimation for Neural Network
Pruning", CVPR 2019 (arXiv 1906.10771).

A layer that shrinks keeps its best units by one of the two, in their order. One that grows keeps all; new units come
after them with weights as at the start and zeros on their way out ("zero": the model computes what it computed), or
those that were cut come back to their places as they were ("resume").

Paper: X. Du et al., "Alternate Model Growth and Pruning for Efficient Training of Recommendation Systems", ICMLA 2021
(arXiv 2105.01064). Only its abstract could be read: units, scores and what new ones begin with are our choice.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from scalejax import optim
from scalejax.errors import UserError, check_one_of
from scalejax.train.checkpoints.array_store import AnyArray
from scalejax.train.checkpoints.manifest import Shaped
from scalejax.train.checkpoints.trained import Trained

Growth = Literal["zero", "resume"]
Score = Literal["norm", "taylor"]

_LINEAR = re.compile(r"(.*\blayers)/(\d+)/(kernel|bias)")
_PARAMS = "params."


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenLayer:
    """A hidden layer of an MLP.

    Attributes:
      layers: Path of the list of the MLP's layers, "top/layers".
      number: In it.
      width: Units.
    """

    layers: str
    number: int
    width: int

    @property
    def name(self) -> str:
        """Path of the layer into the units."""
        return f"{self.layers}/{self.number}"

    @property
    def kernel(self) -> str:
        """Path of W [inputs, width]."""
        return f"{self.name}/kernel"

    @property
    def bias(self) -> str:
        """Path of the bias [width]."""
        return f"{self.name}/bias"

    @property
    def out(self) -> str:
        """Path of V [width, outputs]."""
        return f"{self.layers}/{self.number + 1}/kernel"


def hidden_layers(params: Mapping[str, Shaped]) -> tuple[HiddenLayer, ...]:
    """The hidden layers of all MLPs among parameters by path."""
    found = []
    for path, array in params.items():
        match = _LINEAR.fullmatch(path)
        if match and match[3] == "kernel" and len(array.shape) == 2:
            layer = HiddenLayer(layers=match[1], number=int(match[2]), width=array.shape[1])
            if layer.bias in params and layer.out in params and params[layer.out].shape[0] == layer.width:
                found.append(layer)
    return tuple(found)


def norm_scores(params: Mapping[str, AnyArray], layer: HiddenLayer) -> np.ndarray:
    """float64[width]: ||W[:, j]|| ||V[j, :]||."""
    into, out = (np.asarray(params[path][...], np.float64) for path in (layer.kernel, layer.out))
    return np.linalg.norm(into, axis=0) * np.linalg.norm(out, axis=1)


def taylor_scores(params: Mapping[str, AnyArray], squares: Mapping[str, AnyArray], layer: HiddenLayer) -> np.ndarray:
    """float64[width]: sum of w^2 mean((dL/dw)^2) over the weights of a unit.

    Args:
      params: By path.
      squares: Means of squares of their derivatives, by path.
      layer: Whose units.
    """
    terms = {
        path: np.square(np.asarray(params[path][...], np.float64)) * np.asarray(squares[path][...], np.float64)
        for path in (layer.kernel, layer.bias, layer.out)
    }
    return terms[layer.kernel].sum(axis=0) + terms[layer.bias] + terms[layer.out].sum(axis=1)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """int[count]: the units with the highest scores, of equal ones the first, in ascending order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


Kept = Mapping[str, np.ndarray]
"""Name of a hidden layer -> which of its units there are in the narrower of two models, ascending."""


def cut(wide: Mapping[str, AnyArray], kept: Kept) -> dict[str, np.ndarray]:
    """The arrays of a state without the units that are not kept; names end in the path of a parameter."""
    return {name: np.asarray(array[...])[_block(name, array.shape, kept)] for name, array in wide.items()}


def put(narrow: Mapping[str, AnyArray], kept: Kept, wide: Mapping[str, AnyArray]) -> dict[str, np.ndarray]:
    """The arrays of a wide state with those of a narrow one in the places of its units: the inverse of `cut`."""
    found = {}
    for name, array in narrow.items():
        found[name] = np.array((array if array.shape == wide[name].shape else wide[name])[...])
        found[name][_block(name, wide[name].shape, kept)] = array[...]
    return found


def _block(name: str, shape: Sequence[int], kept: Kept) -> tuple[np.ndarray, ...]:
    """Index of what belongs to kept units alone."""
    index = [np.arange(size) for size in shape]
    for axis, layer in _axes(name).items():
        index[axis] = kept.get(layer, index[axis])
    return np.ix_(*index)


def _axes(name: str) -> dict[int, str]:
    """Axis of a named array -> the layer whose units are counted along it, if that is a hidden one."""
    match = _LINEAR.fullmatch(_path(name))
    if match is None:
        return {}
    own = {-1: f"{match[1]}/{match[2]}"}
    return own if match[3] == "bias" else {**own, 0: f"{match[1]}/{int(match[2]) - 1}"}


def _path(name: str) -> str:
    """Path of the parameter that a named array of a state belongs to."""
    return name.rpartition(".")[2]


def _params(state: Mapping[str, Shaped]) -> dict[str, Shaped]:
    return {name.removeprefix(_PARAMS): x for name, x in state.items() if name.startswith(_PARAMS)}


def _widths(state: Mapping[str, Shaped]) -> dict[str, int]:
    return {layer.name: layer.width for layer in hidden_layers(_params(state))}


def _second_moments(state: Mapping[str, Shaped]) -> dict[str, str]:
    """Path of a parameter -> name of Adam's mean of the squares of its derivatives, where there is one."""
    return {_path(name): name for name in state if re.match(r"optimizer\.(.+\.)?nu\.", name)}


def _mean_squares(
    state: Mapping[str, AnyArray], paths: Sequence[str], optimizer: optim.Optimizer | None
) -> dict[str, np.ndarray]:
    """Adam's second moments of parameters, corrected for the steps that each number has seen."""
    names, found = _second_moments(state), {}
    for path in paths:
        name = names[path]
        count = state.get(name.replace(f"nu.{path}", f"count.{path}"), state.get(name.replace(f"nu.{path}", "count")))
        assert count is not None, name
        steps = np.maximum(np.asarray(count[...], np.float64), 1)
        adam = optimizer.of(path) if isinstance(optimizer, optim.ByPath) else optimizer
        assert adam is not None and not isinstance(adam, optim.Sgd), name  # noqa: PT018 (one question: whose moments)
        found[path] = np.asarray(state[name][...], np.float64) / (1 - adam.b2**steps)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeUnits:
    """The trained model with hidden layers as wide as those of the model to be. A `train.experiment.StatefulSurgery`.

    Where all widths stay, as where a multiple rounds them up to what they are, the model is as it was.

    Attributes:
      growth: What a layer that grows gets: new units, or those that phases before have cut.
      score: By which a layer that shrinks keeps units. "taylor" reads the second moments of Adam or AdamW.
    """

    growth: Growth = "zero"
    score: Score = "norm"

    REMAKES = ("hidden",)

    def __post_init__(self) -> None:
        check_one_of("ResizeUnits: growth", self.growth, get_args(Growth))
        check_one_of("ResizeUnits: score", self.score, get_args(Score))

    @property
    def reads_history(self) -> bool:
        """Whether it needs the states from before units were cut."""
        return self.growth == "resume"

    def operate(self, trained: Trained, fresh: Trained) -> Trained:
        """See `train.experiment.Surgery`.

        Raises:
          UserError: the models differ in other things than widths of hidden layers.
        """
        there, new = ({_PARAMS + path: x for path, x in own.params.items()} for own in (trained, fresh))
        for name, average in trained.averages.items():  # of new units they begin with what parameters do
            there |= {f"averages.{name}.{path}": x for path, x in average.items()}
            new |= {f"averages.{name}.{path}": fresh.params[path] for path in average if path in fresh.params}
        self.check([there], new)
        made = self.operate_state([there], new, [None])
        params = {name.removeprefix(_PARAMS): array for name, array in made.items() if name.startswith(_PARAMS)}
        averages = {
            name: {path: made[f"averages.{name}.{path}"] for path in average}
            for name, average in trained.averages.items()
        }
        return dataclasses.replace(trained, params=params, averages=averages, copies={}, identity=fresh.identity)

    def check(self, history: Sequence[Mapping[str, Shaped]], fresh: Mapping[str, Shaped]) -> None:
        """See `train.experiment.StatefulSurgery`.

        Raises:
          UserError: as `operate`; or units cannot come back; or the optimizer counts no steps of their own.
        """
        before, now = _widths(history[-1]), _widths(fresh)
        if not now:
            raise UserError(
                "surgery.units: the model to be has no MLP with a hidden layer, and so no units that could come or go. "
                "Leave the surgery out, or give a model with hidden widths, such as model.top_hidden of a DLRM."
            )
        if before.keys() != now.keys():
            others = ", ".join(sorted(before.keys() ^ now.keys()))
            raise UserError(
                f"surgery.units: only one of the two models has the hidden layers {others}. Change widths alone; the "
                "number of layers stays."
            )
        for name, new in fresh.items():
            old, wanted = history[-1].get(name), list(new.shape)
            same = [] if old is None else list(old.shape)
            for axis, layer in _axes(name).items():
                if same and layer in now:
                    same[axis] = now[layer]
            if old is None or same != wanted:
                was = "not there" if old is None else f"{list(old.shape)}"
                linear = _LINEAR.fullmatch(_path(name))
                why = "which is no matter of hidden units. Change widths of hidden layers alone."
                if linear and len(wanted) > (1 if linear[3] == "bias" else 2):
                    why = (
                        "and units of MLPs whose parameters are stacked, as those of the modules of towers, neither "
                        "come nor go. Change widths of the model over the towers alone, such as model.base.top_hidden."
                    )
                raise UserError(
                    f"surgery.units: {name} is {wanted} in the model to be and {was} in the one before, {why}"
                )
        squares = _second_moments(history[-1])
        layers = hidden_layers(_params(history[-1]))
        missing = [layer.name for layer in layers if not squares.keys() >= {layer.kernel, layer.bias, layer.out}]
        if self.score == "taylor" and any(now[name] < width for name, width in before.items()) and missing:
            raise UserError(
                "surgery.units: score='taylor' reads Adam's second moments of the weights of units, and there are none "
                f"for {missing[0]!r}. Train it with optimizer=Adam or AdamW in the phase before, or take score='norm'."
            )
        grows = [layer for layer in hidden_layers(_params(fresh)) if layer.width > before[layer.name]]
        if grows and self.growth == "resume" and not self._undone(history, now):
            raise UserError(
                "surgery.units: growth='resume' brings back units that phases before have cut, and no state before has "
                "had the widths of the model to be with nothing but cuts since. Take growth='zero', or grow to "
                "widths that there were."
            )
        for layer in grows:
            for name in fresh:
                if name.endswith(f".mu.{layer.kernel}") and name.replace(".mu.", ".count.") not in fresh:
                    raise UserError(
                        "surgery.units: the optimizer counts its steps once for all parameters, so that the moments of "
                        f"the new units of {layer.name!r} would be corrected for steps that they have not seen. Set "
                        "--set optimizer.counts=each, which Adam and AdamW have, alone or in the rules of ByPath, from "
                        "the beginning of the run."
                    )

    def operate_state(
        self,
        history: Sequence[Mapping[str, AnyArray]],
        fresh: Mapping[str, AnyArray],
        optimizers: Sequence[optim.Optimizer | None],
    ) -> dict[str, np.ndarray]:
        """See `train.experiment.StatefulSurgery`."""
        now = _widths(fresh)
        state: Mapping[str, AnyArray] = {name: history[-1][name] for name in fresh}
        before = _widths(state)
        if any(now[name] > width for name, width in before.items()) and self.growth == "resume":
            for number in self._undone(history, now):
                kept = self._selected(history[number], _widths(state), optimizers[number])
                state = put(state, kept, history[number])
            return {name: np.asarray(array[...]) for name, array in state.items()}
        narrow = {name: min(width, now[name]) for name, width in before.items()}
        state = cut(state, self._selected(history[-1], narrow, optimizers[-1]))
        kept = {name: np.arange(before[name]) for name in now if now[name] > before[name]}
        made = put(state, kept, fresh)
        for name, array in made.items():  # what leaves new units, in parameters and averages; of moments it is zero
            if (layer := _axes(name).get(0)) in kept:
                array[len(kept[layer]) :] = 0
        return made

    def _selected(
        self, wide: Mapping[str, AnyArray], widths: Mapping[str, int], optimizer: optim.Optimizer | None
    ) -> Kept:
        """The units that are left of a state where its layers shrink to these widths."""
        params = {name.removeprefix(_PARAMS): x for name, x in wide.items() if name.startswith(_PARAMS)}
        kept = {}
        for layer in hidden_layers(params):
            if widths[layer.name] < layer.width:
                if self.score == "taylor":
                    squares = _mean_squares(wide, (layer.kernel, layer.bias, layer.out), optimizer)
                    scores = taylor_scores(params, squares, layer)
                else:
                    scores = norm_scores(params, layer)
                kept[layer.name] = best(scores, widths[layer.name])
        return kept

    def _undone(self, history: Sequence[Mapping[str, Shaped]], widths: Mapping[str, int]) -> list[int]:
        """Numbers of the states before each cut, from the newest, back to one of these widths; [] if there is none."""
        found, current = [], _widths(history[-1])
        for number in reversed(range(len(history) - 1)):
            own = _widths(history[number])
            if own.keys() != current.keys() or any(own[name] < width for name, width in current.items()):
                break
            if own != current:
                found.append(number)
                current = own
            if current == widths:
                return found
        return []
