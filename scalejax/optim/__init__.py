"""Typed optimizer and schedule configs over optax."""

from scalejax.optim.averages import Average as Average
from scalejax.optim.layerwise import Lamb as Lamb
from scalejax.optim.layerwise import Lans as Lans
from scalejax.optim.layerwise import TrustBounds as TrustBounds
from scalejax.optim.optimizers import Adam as Adam
from scalejax.optim.optimizers import AdamL2 as AdamL2
from scalejax.optim.optimizers import AdamW as AdamW
from scalejax.optim.optimizers import ByPath as ByPath
from scalejax.optim.optimizers import For as For
from scalejax.optim.optimizers import Optimizer as Optimizer
from scalejax.optim.optimizers import Sgd as Sgd
from scalejax.optim.schedules import Constant as Constant
from scalejax.optim.schedules import Schedule as Schedule
from scalejax.optim.schedules import WarmupCosine as WarmupCosine
from scalejax.optim.schedules import WarmupCosineAnneal as WarmupCosineAnneal
from scalejax.optim.schedules import WarmupLinear as WarmupLinear
