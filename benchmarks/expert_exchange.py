"""Which all-to-alls of a step with experts run beside other work, by the TPU compiler's schedule, as Markdown.

    JAX_PLATFORMS=cpu python benchmarks/expert_exchange.py > benchmarks/results/expert_exchange.md

The step of a small Mixtral and of a small MoMa on eight chips, fsdp 2 and expert 4, is compiled for chips that are not
here, with the kernels of a TPU. Bytes are those of `parallel.expert`: of P places of width E and b bytes an element
P E b go in, four times a layer.
"""

import dataclasses
import sys

from scalejax import optim
from scalejax.bench import machine
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.data.text.files import TextData
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.models.llm.moma import ModalityExperts
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import LLM
from scalejax.plan import topology
from scalejax.plan.compiled import collectives, hlo
from scalejax.plan.run import no_compile_cache
from scalejax.train.experiment import Experiment, Placement
from scalejax.train.runs import binding

CHIPS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
SHAPE = MeshShape(fsdp=2, expert=4)
ROWS, LENGTH, EXPERTS = 16, 512, 8
MODEL = LlamaConfig(
    layers=2,
    dim=256,
    ffn_dim=512,
    heads=2,
    kv_heads=2,
    vocabulary=1024,
    max_positions=LENGTH,
    loss_positions=LENGTH,
    attention="pallas_tpu",
    remat="none",
)
MIXTRAL = Experts(count=EXPERTS, router=TopK(k=2), implementation="pallas_tpu")
MODELS = {
    "Mixtral": MIXTRAL,
    "Mixtral, ragged": dataclasses.replace(MIXTRAL, router=TopK(k=2, exchange="ragged")),
    "MoMa": ModalityExperts(groups=(("text", 4), ("image", 4)), router=ExpertChoice(group="device")),
}
ASYNC = "tpu-async-all-to-all"


def experiment(model: str, *flags: str) -> Experiment:
    """A run of one of `MODELS`."""
    data = TextData(length=LENGTH, batch_size=ROWS, vocabulary=MODEL.vocabulary)
    if model == "MoMa":
        data = TwoModalityData(length=LENGTH, batch_size=ROWS, vocabulary=MODEL.vocabulary, image_share=(0.4, 0.6))
    return Experiment(
        model=dataclasses.replace(MODEL, mlp=MODELS[model]),
        data=data,
        steps=10,
        optimizer=optim.AdamW(learning_rate=optim.Constant(value=1e-3)),
        strategy=Fsdp(sharding="FULL_SHARD", form="explicit", param_dtype="bfloat16"),
        placement=Placement(rules=LLM),
        xla_flags=flags,
    )


def compiled(chip: str, model: str, *flags: str) -> tuple[str, list[collectives.Collective]]:
    """The compiled step as text, and its collectives."""
    whole = experiment(model, *flags)
    mesh, _ = topology.make_mesh(topology.parse(CHIPS[chip]), SHAPE)
    program = binding.bind(whole, whole.data.schema(), mesh)
    with no_compile_cache():
        text = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile().as_text()
    return text, collectives.of_module(hlo.parse(text), mesh)


def places(model: str) -> int:
    """P, those that a device sends in a layer; of a ragged exchange at most."""
    rows = ROWS // (SHAPE.fsdp * SHAPE.expert)
    if model == "Mixtral":
        return SHAPE.expert * rows * LENGTH * min(2, EXPERTS // SHAPE.expert)
    if model != "MoMa":
        return rows * LENGTH * 2
    schema = experiment(model).data.schema()
    return sum(4 * (rows * schema.capacity(number) // 4) for number in range(2))


def sent(model: str) -> int:
    """Bytes of the all-to-alls of a step: bfloat16 tokens four times, and once the int32 expert of each."""
    numbers = 4 * places(model) if model == "Mixtral" else 0
    return MODEL.layers * (4 * places(model) * MODEL.dim * 2 + numbers)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """One all-to-all of the schedule.

    Attributes:
      dtype: Of what travels.
      count: How often a step runs it.
      beside: Kernels and fusions with a product between its start and its end; None = it is one instruction, for which
        all others wait.
    """

    dtype: str
    count: int
    beside: int | None


def schedule(text: str) -> list[Scheduled]:
    """The all-to-alls of a compiled step, in their order."""
    module, found = hlo.parse(text), []
    for execution in module.executions():
        order = execution.computation.instructions
        for first, start in enumerate(order):
            if start.opcode in ("all-to-all", "ragged-all-to-all"):
                found.append(Scheduled(start.arrays[0].dtype, execution.count, None))
            elif start.opcode in ("all-to-all-start", "ragged-all-to-all-start"):
                done = start.opcode.replace("start", "done")
                last = next(n for n, i in enumerate(order) if i.opcode == done and start.name in i.operands)
                work = sum(_multiplies(module, between) for between in order[first + 1 : last])
                found.append(Scheduled(order[last].arrays[0].dtype, execution.count, work))
    return found


def _multiplies(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return '"tpu_custom_call"' in instruction.attributes
    inner = [i for name in instruction.called("calls") for i in module.computations[name].instructions]
    return any(i.opcode in ("dot", "convolution") for i in [instruction, *inner])


def row(chip: str, model: str, *flags: str) -> str:
    """A line of the table."""
    text, found = compiled(chip, model, *flags)
    exchanged = schedule(text)
    pairs = [one for one in exchanged if one.beside is not None]
    busy = [one for one in pairs if one.beside]
    total = sum(c.bytes for c in found if c.kind.endswith("all-to-all") and c.axis == "expert")
    assert total == sent(model), (chip, model, total, sent(model))
    cells = (
        f"`{CHIPS[chip]}`",
        model,
        ", ".join(f"`{flag}`" for flag in flags) or "none",
        str(sum(one.count for one in exchanged)),
        str(sum(one.count for one in pairs)),
        str(sum(one.count for one in busy)),
        f"{total:,}" + (" at most" if "ragged" in model else ""),
        str(text.count('custom_call_target="tpu_custom_call"')),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    print("# All-to-alls of a step with experts, as compiled\n")
    print(f"{machine.today()}, commit {machine.commit()}, by the TPU compiler; nothing ran on a chip.")
    print("`JAX_PLATFORMS=cpu python benchmarks/expert_exchange.py`\n")
    print(
        f"{MODEL.layers} layers, width {MODEL.dim}, hidden {MODEL.ffn_dim}, {EXPERTS} experts, {ROWS} rows of {LENGTH} "
        "tokens, fsdp 2 x expert 4, explicit form, bfloat16, nothing rematerialised. In pairs: a start and an end\n"
        "apart in the schedule; beside work: with a kernel or a matrix product between the two. Bytes of a device "
        "are those of the formula in `parallel/expert.py`, which the script asserts.\n"
    )
    head = ("topology", "model", "options", "all-to-alls a step", "in pairs", "beside work", "bytes", "kernels")
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for chip in CHIPS:
        for model in MODELS:
            for flags in ((), (ASYNC,)):
                print(row(chip, model, *flags), flush=True)


if __name__ == "__main__":
    sys.exit(main())
