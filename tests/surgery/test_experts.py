"""Models with experts made of trained ones."""

import dataclasses

import numpy as np
import pytest
import small_language_run as small
from llama_cases import GQA

from scalejax import optim
from scalejax.errors import UserError
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.moma import ModalityExperts
from scalejax.surgery.experts import AddAuxiliaryRouters, Upcycle
from scalejax.train import loop, phases
from scalejax.train.checkpoints.trained import Trained, open_run
from scalejax.train.experiment import Init, Phase


def drawn(mlp, seed, **changes):
    """A model's parameters, as `Trained`."""
    from flax import nnx

    from scalejax.models.llm.llama3.model import Llama
    from scalejax.nn import Dtypes
    from scalejax.train.state import ModelShape

    model = Llama(dataclasses.replace(GQA, mlp=mlp, **changes), nnx.Rngs(seed), Dtypes("float32"))
    return Trained(
        params={path: np.asarray(x) for path, x in ModelShape.of(model).split(model).items()}, step=7, origin="a test"
    )


@pytest.mark.slow
def test_an_mlp_is_copied_into_every_expert_and_routers_are_new():
    dense, fresh = drawn(GQA.mlp, 0), drawn(Experts(count=4), 1)
    made = Upcycle().operate(dense, fresh)
    assert set(made.params) == set(fresh.params)
    for name in ("gate", "up", "down"):
        path = f"layers/mlp/{name}"
        expected = np.broadcast_to(np.asarray(dense.params[path])[:, None], fresh.params[path].shape)
        np.testing.assert_array_equal(made.params[path][...], expected)
        np.testing.assert_array_equal(made.params[path][1, 2:4], expected[1, 2:4])
    np.testing.assert_array_equal(made.params["layers/mlp/router"][...], fresh.params["layers/mlp/router"])
    np.testing.assert_array_equal(made.params["embed/weight"][...], dense.params["embed/weight"])


@pytest.mark.slow
def test_one_expert_of_a_modality_becomes_several():
    few = drawn(ModalityExperts(groups=(("text", 1), ("image", 1))), 0)
    fresh = drawn(ModalityExperts(groups=(("text", 4), ("image", 2))), 1)
    made = Upcycle().operate(few, fresh)
    for name, count in (("text", 4), ("image", 2)):
        gate = made.params[f"layers/mlp/{name}/gate"][...]
        assert gate.shape[1] == count
        for expert in range(count):
            np.testing.assert_array_equal(gate[:, expert], few.params[f"layers/mlp/{name}/gate"][:, 0])


@pytest.mark.slow
def test_a_mixture_of_depths_becomes_one_with_experts_and_with_auxiliary_routers():
    depth = MixtureOfDepths()
    before, fresh = (drawn(mlp, seed, depth=depth) for seed, mlp in enumerate((GQA.mlp, Experts(count=4))))
    made = Upcycle().operate(before, fresh)
    for layers in ("some", "all"):
        copies, one = (run.params[f"layers/{layers}/mlp/up"][...] for run in (made, before))
        np.testing.assert_array_equal(copies, np.broadcast_to(np.asarray(one)[:, None], copies.shape))
    np.testing.assert_array_equal(made.params["layers/router"][...], before.params["layers/router"])
    with_guesses = drawn(GQA.mlp, 2, depth=dataclasses.replace(depth, auxiliary=AuxiliaryRouter()))
    made = AddAuxiliaryRouters().operate(before, with_guesses)
    np.testing.assert_array_equal(made.params["layers/router"][...], before.params["layers/router"])
    assert set(made.params) - set(before.params) == {"layers/auxiliary_in", "layers/auxiliary_out"}


@pytest.mark.slow
def test_every_expert_becomes_as_many_as_every_other():
    few, fresh = drawn(Experts(count=2), 0), drawn(Experts(count=6), 1)
    up = Upcycle().operate(few, fresh).params["layers/mlp/up"][...]
    for expert in range(6):
        np.testing.assert_array_equal(up[:, expert], few.params["layers/mlp/up"][:, expert // 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "surgery", "message"),
    [
        (
            Experts(count=4),
            Experts(count=6),
            Upcycle(),
            r"'layers/mlp/down' .* is \(\d+, 6, .*of the trained one \(\d+, 4, ",
        ),
        (GQA.mlp, Experts(count=4), AddAuxiliaryRouters(), "Upcycle changes the number of experts"),
        (ModalityExperts(groups=(("text", 1),)), ModalityExperts(), Upcycle(), "of the trained one not there"),
    ],
)
def test_what_is_no_copy_is_refused(before, after, surgery, message):
    with pytest.raises(UserError, match=message):
        surgery.operate(drawn(before, 0), drawn(after, 1))


def test_auxiliary_routers_are_for_the_choice_that_was_trained():
    trained, fresh = (
        dataclasses.replace(drawn(ModalityExperts(), 0), identity={"model.mlp.router.group": group})
        for group in ("device", "sequence")
    )
    with pytest.raises(UserError, match=r"router.group is 'device' in the checkpoint and 'sequence' here"):
        AddAuxiliaryRouters().operate(trained, fresh)


@pytest.mark.slow
def test_a_llama_goes_on_as_a_mixtral_in_a_phase(tmp_path):
    """With the examples that follow, and an optimizer that begins anew."""
    texts = small.write(tmp_path / "documents")
    phase = Phase(name="experts", steps=2, changes={"model.mlp": Experts(count=4, router=TopK(k=2))}, surgery=Upcycle())
    made = dataclasses.replace(small.experiment(texts, steps=2), phases=(phase,))
    summary = loop.train(made, workdir=tmp_path / "run")
    assert summary["steps"] == 4
    assert summary["examples"] == 4 * 8
    assert "val_expert_load_max" in summary
    dense, last = phases.resolved(made)
    assert (dense.optimizer_from, last.optimizer_from) == (0, 2)


@pytest.mark.slow
def test_a_mixtral_begins_with_a_finished_llama(tmp_path):
    texts = small.write(tmp_path / "documents")
    llama = small.experiment(texts, steps=2)
    loop.train(llama, workdir=tmp_path / "llama")
    model = dataclasses.replace(llama.model, mlp=Experts(count=4, router=TopK(k=2)))
    begun = Init(path=str(tmp_path / "llama"), surgery=Upcycle())
    small_steps = optim.AdamW(learning_rate=optim.Constant(value=1e-7))
    mixtral = dataclasses.replace(llama, model=model, init=begun, steps=1, optimizer=small_steps)
    loop.train(mixtral, workdir=tmp_path / "mixtral")
    dense, made = (open_run(tmp_path / name).params for name in ("llama", "mixtral"))
    assert made["layers/mlp/gate"].shape[1] == 4
    for expert in range(4):
        np.testing.assert_allclose(made["layers/mlp/gate"][:, expert], dense["layers/mlp/gate"][...], atol=3e-7)
