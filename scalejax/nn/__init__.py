"""Flax NNX blocks that two or more models share by meaning.

Blocks are single-device code. Parameters are created in `dtypes.params` and cast to `dtypes.compute` where they are
used; norm statistics are computed in `wide(...)`, float32 or wider. Every parameter carries `logical_axes`, a tuple
with one name per dimension, as plain metadata; a rules table maps the names to mesh axes:

    input    contracted dimension of a matrix          hidden    produced dimension of a matrix, and its bias
    norm     scale and bias of a normalisation

Models of language have names of their own: embed, heads, kv_heads, head, hidden, vocabulary, and layers, the axis of
stacked layers, which is never sharded.
"""

from scalejax.nn.attention import attend as attend
from scalejax.nn.attention import constrain as constrain
from scalejax.nn.convolution import Conv as Conv
from scalejax.nn.cross_entropy import linear_cross_entropy as linear_cross_entropy
from scalejax.nn.distinct import over_distinct_rows as over_distinct_rows
from scalejax.nn.dropout import dropout as dropout
from scalejax.nn.layers import scan_layers as scan_layers
from scalejax.nn.linear import Linear as Linear
from scalejax.nn.linear import project as project
from scalejax.nn.linear import scaled_normal as scaled_normal
from scalejax.nn.linear import wide as wide
from scalejax.nn.mlp import Activation as Activation
from scalejax.nn.mlp import Mlp as Mlp
from scalejax.nn.mlp import activate as activate
from scalejax.nn.mlp import check_mlp as check_mlp
from scalejax.nn.norm import BatchNorm as BatchNorm
from scalejax.nn.norm import ConvNorm as ConvNorm
from scalejax.nn.norm import GroupNorm as GroupNorm
from scalejax.nn.norm import LayerNorm as LayerNorm
from scalejax.nn.norm import RMSNorm as RMSNorm
from scalejax.nn.norm import rms_norm as rms_norm
from scalejax.nn.pages import PagedCache as PagedCache
from scalejax.nn.pages import PageShape as PageShape
from scalejax.nn.pages import Reading as Reading
from scalejax.nn.products import products as products
from scalejax.nn.resize import resize as resize
from scalejax.numerics.dtypes import FLOAT32 as FLOAT32
from scalejax.numerics.dtypes import Dtypes as Dtypes
