"""Compile a recipe for a machine that is not here, and read what it needs: memory, FLOPs, bytes moved, least time.

    result = plan(experiment, "v5p:2x2x1")
    result.memory.fits, result.roofline.predicted_step_s
    print(collectives_table(explain_sharding(compiled)))    # every collective of any compiled program
    search(experiment, "v6e:16x16")     # the mesh and the rematerialisation of a decoder
    check_fits(experiment, mesh)        # refuses what cannot fit, before anything is compiled
    gpu_steps.plan_on_gpus(work, gpus, batch_size)      # a click model on hosts of GPUs, by arithmetic
    serving.plan_serving(model, machine, mesh, slots=8, context=131_072, piece=512)   # a language model, served

Importing this package needs no TPU compiler; `plan` does.
"""

from scalejax.plan.arithmetic.estimate import check_fits as check_fits
from scalejax.plan.arithmetic.mesh_search import SearchResult as SearchResult
from scalejax.plan.arithmetic.mesh_search import search as search
from scalejax.plan.compiled.collectives import Collective as Collective
from scalejax.plan.compiled.collectives import collectives_table as collectives_table
from scalejax.plan.compiled.collectives import explain_sharding as explain_sharding
from scalejax.plan.run import PlanResult as PlanResult
from scalejax.plan.run import StepProgram as StepProgram
from scalejax.plan.run import plan as plan
from scalejax.plan.run import plan_program as plan_program
from scalejax.plan.topology import Topology as Topology
