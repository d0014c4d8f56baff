"""A run of `moma-smoke` on the command line: both losses, the use of experts, text continued and images drawn."""

import json

import matplotlib.image
import numpy as np
import pytest

from scalejax.cli.commands import generate
from scalejax.data.images.codebook import PatchCodebook
from scalejax.data.images.tokenizer import InterleavedTokenizer
from scalejax.data.images.two_modality import CODEBOOK
from scalejax.data.text.tokenizer import ByteTokenizer
from scalejax.inference import text
from scalejax.train.checkpoints.trained import open_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(language_run):
    return language_run("moma-smoke")


def test_eval_shows_both_losses_and_those_of_each_modality(invoke, run):
    done = invoke("eval", str(run))
    assert done.exit_code == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    for shown, name in (
        ("loss", "val_loss"),
        ("loss, seeing later tokens", "val_loss_topk"),
        ("loss, image", "val_loss/image"),
    ):
        (line,) = (line for line in done.stdout.splitlines() if line.strip().rsplit(maxsplit=1)[:1] == [shown])
        assert line.split()[-1] == f"{summary[name]:.4f}"


def test_the_report_draws_the_load_of_experts_and_names_those_without_a_token(invoke, run, tmp_path):
    done = invoke("report", str(run))
    assert done.exit_code == 0, done.stderr
    page = (run / "report.html").read_text()
    for name in ("text", "image"):
        assert f"Tokens of each expert of {name} over the mean of its layer; without any: none." in page


def test_generate_continues_text_and_draws_whole_images(invoke, run, tmp_path):
    asked = ("--prompt", "a\n<image>", "--max-tokens", "50", "--temperature", "1", "--seed", "3", "--mesh", "fsdp=8")
    done = invoke("generate", str(run), *asked)
    assert done.exit_code == 0, done.stderr
    assert "whole images; --images FOLDER writes them." in done.stderr
    done = invoke("generate", str(run), *asked, "--images", str(tmp_path / "drawn"))
    assert done.exit_code == 0, done.stderr
    count = int(done.stderr.split(" whole images in ")[0].split()[-1])
    assert len(list((tmp_path / "drawn").glob("image-*.png"))) == count


def test_what_is_drawn_are_the_pixels_of_the_codes(run, tmp_path, capsys):
    """Of a model of a few steps an image is never whole, so tokens are given."""
    codebook = PatchCodebook.read(run / CODEBOOK)
    tokenizer = InterleavedTokenizer(text=ByteTokenizer(), codes=len(codebook)).build()
    codes = np.random.default_rng(0).integers(0, len(codebook), (2, 49))
    ids = tokenizer.ids
    first, second = ((ids.first_code + row).tolist() for row in codes)
    made = [
        text.Completion("a<image>", "", (*first, ids.end_image, 98, ids.begin_image, *second), "length"),
        text.Completion("b", "", (98, 99), "length"),
    ]
    writer = text.Writer(None, tokenizer, (), ())
    generate._draw(codebook, writer, made, tmp_path / "drawn")
    assert "2 whole images in" in capsys.readouterr().err
    for number, pixels in enumerate(codebook.decode(codes)):
        drawn = matplotlib.image.imread(tmp_path / "drawn" / f"image-{number + 1}.png")
        np.testing.assert_array_equal(np.rint(255 * drawn).astype(np.uint8), pixels)


def test_images_of_a_model_of_text_are_refused_before_anything_is_generated(invoke, language_run, tmp_path):
    done = invoke(
        "generate", str(language_run("llama-smoke")), "--prompt", "a", "--images", str(tmp_path), "--mesh", "fsdp=8"
    )
    assert done.exit_code == 2
    assert "is a model of text alone" in done.stderr
    assert not done.stdout


def test_what_has_no_folder_is_refused(invoke, run, tmp_path):
    done = invoke("convert", str(run), str(tmp_path / "theirs"))
    assert done.exit_code == 2
    assert "have no form in folders of Hugging Face" in done.stderr


def test_mixture_of_depths_trains_its_auxiliary_routers_alone_and_generates(invoke, language_run):
    run = language_run("moma-mod-smoke")
    last, before = (open_run(run, step).params for step in (None, 2))
    for path, value in before.items():
        np.testing.assert_array_equal(last[path][...], value[...], err_msg=path)
    assert {"layers/auxiliary_in", "layers/some/mlp/text/auxiliary_in", "layers/all/mlp/image/auxiliary_out"} <= {
        path for path in last if path not in before
    }
    summary = json.loads((run / "summary.json").read_text())
    assert {"val_loss", "val_loss_topk", "val_auxiliary_loss/depth"} <= set(summary)
    done = invoke("generate", str(run), "--prompt", "a\n<image>", "--max-tokens", "8", "--mesh", "fsdp=8")
    assert done.exit_code == 0, done.stderr
    done = invoke("eval", str(run))
    assert done.exit_code == 0, done.stderr
    assert "loss of auxiliary routers, depth" in done.stdout
    done = invoke("convert", str(run), str(run.parent / "theirs"))
    assert done.exit_code == 2
    assert "mixture-of-depths have no form in folders" in done.stderr
