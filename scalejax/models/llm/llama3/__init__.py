"""Llama 3: one decoder family from 1B to 405B parameters.

Read `config.py` (shapes), `rope.py` (positions), `parts.py` (attention, MLP, norm), `model.py` (the network), `task.py`
(what training minimises), `huggingface.py` (checkpoints of others), in this order.
"""

from scalejax.models.llm.llama3.config import SIZES as SIZES
from scalejax.models.llm.llama3.config import LlamaConfig as LlamaConfig
from scalejax.models.llm.llama3.model import Llama as Llama
from scalejax.models.llm.llama3.parts import GatedMlp as GatedMlp
from scalejax.models.llm.llama3.parts import GroupedQueryAttention as GroupedQueryAttention
from scalejax.models.llm.llama3.parts import RmsNorm as RmsNorm
from scalejax.models.llm.llama3.parts import StackedNormal as StackedNormal
from scalejax.models.llm.llama3.rope import RopeScaling as RopeScaling
from scalejax.models.llm.llama3.task import LlamaTask as LlamaTask
