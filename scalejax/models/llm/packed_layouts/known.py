"""The layouts that are known: found by what `--layout` names, or by what a `quantization_config` says."""

from scalejax.errors import UnsupportedError, UserError, check_one_of
from scalejax.models.llm.packed_layouts.compressed_tensors import BYTES, CompressedTensors
from scalejax.models.llm.packed_layouts.gpt_oss import GptOss
from scalejax.models.llm.packed_layouts.protocol import PackedLayout, Shape
from scalejax.models.llm.packed_layouts.scalejax_layout import ScalejaxLayout
from scalejax.numerics import formats
from scalejax.numerics.quantized import static

LAYOUTS: dict[str, PackedLayout] = {layout.name: layout for layout in (ScalejaxLayout(), CompressedTensors(), GptOss())}
_INT8 = CompressedTensors(integers="bytes")
_METHODS = {"scalejax": "scalejax", "compressed-tensors": "compressed-tensors", "mxfp4": "gpt-oss"}


def find_layout(name: str, inputs: static.Format | None = None) -> PackedLayout:
    """The layout that `--layout` names, for weights that multiply such inputs.

    Raises:
      UserError: there is no such layout.
    """
    check_one_of("--layout", name, LAYOUTS)
    return _INT8 if name == _INT8.name and inputs == "int8" else LAYOUTS[name]


def check_inputs(layout: PackedLayout, name: str, inputs: static.Format, shape: Shape) -> None:
    """Refuses a static scale for what a weight multiplies where there can be none.

    Raises:
      UnsupportedError: names the weight, and what the layout or the format lacks.
    """
    if layout.input_part(name, inputs) is None:
        raise UnsupportedError(
            f"--layout {layout.name} has no scales of activations ({name}). Leave --activations out, or choose "
            "--layout scalejax or compressed-tensors."
        )
    if inputs == "nvfp4" and shape[-1] % formats.find(inputs).k1:
        raise UnsupportedError(
            f"--activations nvfp4: {name} sums over {shape[-1]} values, no multiple of blocks of 16. Take fp8_e4m3 or "
            "int8."
        )


def layout_of(content: object, where: str) -> PackedLayout:
    """The layout that a `quantization_config` speaks of.

    Raises:
      UserError: none that is known here.
    """
    given = content if isinstance(content, dict) else {}
    method = given.get("quant_method")
    if method not in _METHODS:
        raise UserError(
            f"{where}: quant_method {method!r}: quantised weights of this kind are not known here; "
            f"{', '.join(_METHODS)} are. Get the model unquantised and use `scalejax quantize`."
        )
    groups = given.get("config_groups")
    kinds = [g.get("format") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    whole = _METHODS[method] == _INT8.name and BYTES.format in (given.get("format"), *kinds)
    return _INT8 if whole else LAYOUTS[_METHODS[method]]
