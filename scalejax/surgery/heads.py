"""Classifiers for other classes: all that was trained but the head, `init=Init(path=FOLDER, surgery=NewHead())`."""

import dataclasses

from scalejax.train.checkpoints.trained import Trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewHead:
    """The trained model with the head of a new one. A `train.experiment.Surgery`.

    Attributes:
      head: Path of the module that is new.
    """

    head: str = "head"

    REMAKES = ()

    def operate(self, trained: Trained, fresh: Trained) -> Trained:
        """See `train.experiment.Surgery`; what else differs is refused by whoever takes the model."""
        params = {path: array for path, array in trained.params.items() if not path.startswith(f"{self.head}/")}
        new = {path: array for path, array in fresh.params.items() if path.startswith(f"{self.head}/")}
        return dataclasses.replace(
            fresh, params={**params, **new}, variables={**fresh.variables, **trained.variables}, origin=trained.origin
        )
