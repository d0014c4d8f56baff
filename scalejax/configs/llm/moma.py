"""MoMa (arXiv 2407.21770): early fusion of text and images, with groups of experts for each.

scalejax train moma
"""

import dataclasses

from scalejax import optim
from scalejax.configs.llm import _common
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.models.llm.llama3.parts import OutputRmsNorm
from scalejax.models.llm.moma import ModalityExperts, published
from scalejax.surgery.experts import AddAuxiliaryRouters
from scalejax.train.experiment import Experiment, Phase

_AUXILIARY = "layers/.*auxiliary_(in|out)"


def two_modality() -> Experiment:
    """MoMa 4t4i of 0.9 M parameters on Fashion-MNIST and tiny Shakespeare; then auxiliary routers, to generate."""
    return _with_auxiliary_routers(
        _common.experiment(
            model=LlamaConfig(
                layers=2,
                dim=64,
                ffn_dim=256,
                heads=4,
                kv_heads=4,
                vocabulary=None,
                max_positions=512,
                remat="none",
                unroll=2,
                mlp=ModalityExperts(groups=(("text", 4), ("image", 4))),
                norm=OutputRmsNorm(),
            ),
            data=TwoModalityData(length=128, batch_size=16, image_share=(0.35, 0.45)),
            steps=600,
            optimizer=optim.AdamW(
                learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05, final=0.1), weight_decay=0.1
            ),
            log_every=50,
            eval_every=200,
            save_every=200,
        ),
        steps=200,
        optimizer=optim.AdamW(learning_rate=optim.WarmupLinear(peak=3e-3, warmup=0.1, final=0.1)),
    )


def smoke() -> Experiment:
    """A few steps of a tiny MoMa, and of its auxiliary routers."""
    whole = two_modality()
    assert isinstance(whole.model, LlamaConfig)
    (phase,) = whole.phases
    return dataclasses.replace(
        whole,
        model=dataclasses.replace(
            whole.model, dim=16, ffn_dim=32, unroll=1, mlp=ModalityExperts(groups=(("text", 2), ("image", 2)))
        ),
        data=TwoModalityData(length=128, batch_size=8, codes=16, image_share=(0.35, 0.45)),
        steps=4,
        phases=(dataclasses.replace(phase, steps=4),),
        evaluation=dataclasses.replace(whole.evaluation, every=0),
        log_every=2,
    )


def pretrain_435m() -> Experiment:
    """MoMa 4t4i of the 435M class (1.9 B parameters): set data.images, data.path, data.tokenizer. For accelerators."""
    return _pretrain("435M", rows=1536, steps=160_000, auxiliary=(5000, 1000))


def pretrain_1_4b() -> Experiment:
    """MoMa 4t4i of the 1.4B class (7.1 B parameters): set data.images, data.path, data.tokenizer. For accelerators."""
    return _pretrain("1.4B", rows=2048, steps=120_000, auxiliary=(10_000, 2000))


def mod_smoke() -> Experiment:
    """A few steps of a tiny MoMa with mixture-of-depths, and of its auxiliary routers."""
    whole = smoke()
    assert isinstance(whole.model, LlamaConfig)
    (phase,) = whole.phases
    model = dataclasses.replace(whole.model, layers=4, depth=MixtureOfDepths())
    return _with_auxiliary_routers(
        dataclasses.replace(whole, model=model), steps=phase.steps, optimizer=phase.changes["optimizer"]
    )


def pretrain_1_4b_mod() -> Experiment:
    """MoMa 4t4i with mixture-of-depths of the 1.4B class (12 B parameters): set data as before. For accelerators."""
    return _pretrain("1.4B", rows=2048, steps=120_000, auxiliary=(5000, 2000), depth=MixtureOfDepths())


def _with_auxiliary_routers(experiment: Experiment, *, steps: int, optimizer: optim.Optimizer) -> Experiment:
    """A second phase that trains auxiliary routers alone; all else keeps its bits."""
    assert isinstance(experiment.model, LlamaConfig)
    phase = Phase(
        name="auxiliary",
        steps=steps,
        changes={
            "model.mlp.router.auxiliary": AuxiliaryRouter(),
            **({"model.depth.auxiliary": AuxiliaryRouter()} if experiment.model.depth is not None else {}),
            "trainable": _AUXILIARY,
            "optimizer": optimizer,
        },
        surgery=AddAuxiliaryRouters(),
    )
    return dataclasses.replace(experiment, phases=(phase,))


def _pretrain(
    size: str, *, rows: int, steps: int, auxiliary: tuple[int, int], depth: MixtureOfDepths | None = None
) -> Experiment:
    """Tables 5 and 6 of the paper: rates fall from 1e-4 to 1e-6 in a line, after 4,000 steps of warm-up.

    The optimizer is not printed; AdamW with what is usual. Auxiliary routers keep the batch of the model, where Table 6
    has one of 4 M tokens.
    """
    whole = _common.experiment(
        model=published(size, depth=depth),
        data=TwoModalityData(length=4096, batch_size=rows, codes=8192, image_share=(0.45, 0.55), vocabulary=65_536),
        steps=steps,
        optimizer=_adamw(steps, 4_000),
        strategy=dataclasses.replace(_common.SUMS_IN_FLOAT32, param_dtype="bfloat16"),
        eval_every=1000,
    )
    return _with_auxiliary_routers(whole, steps=auxiliary[0], optimizer=_adamw(*auxiliary))


def _adamw(steps: int, warmup: int) -> optim.AdamW:
    return optim.AdamW(
        learning_rate=optim.WarmupLinear(peak=1e-4, warmup=warmup / steps, final=0.01),
        b1=0.9,
        b2=0.95,
        weight_decay=0.1,
    )
