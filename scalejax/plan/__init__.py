"""Compile a recipe for a machine that is not here, and read what it needs: memory, FLOPs, bytes moved, least time.

    result = plan(experiment, "v5p:2x2x1")
    result.memory.fits, result.roofline.predicted_step_s
    explain_sharding(compiled)          # every collective of any compiled program

Importing this package needs no TPU compiler; `plan` does.
"""

from scalejax.plan.collectives import Collective as Collective
from scalejax.plan.collectives import explain_sharding as explain_sharding
from scalejax.plan.run import PlanResult as PlanResult
from scalejax.plan.run import StepProgram as StepProgram
from scalejax.plan.run import plan as plan
from scalejax.plan.run import plan_program as plan_program
from scalejax.plan.stablehlo import stated_collectives as stated_collectives
from scalejax.plan.topology import Topology as Topology
