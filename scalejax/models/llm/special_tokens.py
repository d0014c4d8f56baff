"""Special tokens of a language model, as files of Hugging Face name them."""

import dataclasses
from collections.abc import Mapping

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids that config.json names; None where it does not.

    Attributes:
      bos: Begins a text.
      eos: End a text, any of them.
      pad: Fills up.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def named(self) -> dict[str, object]:
        """As config.json has them."""
        eos = list(self.eos)
        return {
            "bos_token_id": self.bos,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.pad,
        }


def read_special(content: Mapping[str, object], where: str) -> SpecialTokens:
    """The special tokens that a config.json or generation_config.json names.

    Raises:
      UserError: one is no id.
    """

    def ids(key: str) -> tuple[int, ...]:
        value = content.get(key)
        several = value if isinstance(value, list) else [] if value is None else [value]
        found = tuple(item for item in several if isinstance(item, int) and not isinstance(item, bool))
        if len(found) < len(several):
            raise UserError(f"{where}: {key} must be a token id or a list of them; got {value!r}.")
        return found

    bos, pad = ids("bos_token_id"), ids("pad_token_id")
    return SpecialTokens(bos=bos[0] if bos else None, eos=ids("eos_token_id"), pad=pad[0] if pad else None)


def write_generation_config(tokens: SpecialTokens) -> dict[str, object]:
    """The generation_config.json of a model that came without."""
    return {"_from_model_config": True} | {name: ids for name, ids in tokens.named().items() if ids is not None}
