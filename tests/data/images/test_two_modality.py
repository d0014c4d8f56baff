"""`TwoModalityData`: from images and text to batches, codebooks that are kept, splits that share nothing."""

import dataclasses
import itertools
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from scalejax.data.images import two_modality
from scalejax.data.images.codebook import PatchCodebook
from scalejax.data.images.sources import Digits, ImageFolder
from scalejax.data.images.two_modality import TwoModalityData, TwoModalityDataSet
from scalejax.data.splits import Fractions
from scalejax.data.text.files import TextData
from scalejax.data.text.interleave import Interleave
from scalejax.data.text.mixture import MixtureData
from scalejax.data.text.staged import StagedData
from scalejax.data.text.stages import Stage
from scalejax.data.text.tokenizer import CharacterTokenizer
from scalejax.data.text.tokens import TokenBatch
from scalejax.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """300 images, the last 20 of which are copies of the first, and 40,000 characters."""
    folder = tmp_path_factory.mktemp("two")
    random = np.random.default_rng(0)
    kinds = random.integers(0, 256, (60, 4, 4)).astype(np.uint8)
    images = kinds[random.integers(0, 60, (300, 7, 7))].transpose(0, 1, 3, 2, 4).reshape(300, 28, 28)
    images[280:] = images[:20]
    np.savez(folder / "images.npz", images=images, labels=np.arange(300) % 280 % 3)
    letters = "".join(chr(97 + i) for i in random.integers(0, 26, 40_000))
    (folder / "text.txt").write_text(letters)
    return folder


def make(folder: pathlib.Path, /, **fields: Any) -> TwoModalityData:
    made = {
        "images": ImageFolder(path=str(folder / "images.npz"), names=("boot", "hat", "sock")),
        "codes": 32,
        "path": str(folder / "text.txt"),
        "length": 128,
        "batch_size": 6,
        "folder": str(folder / "kept"),
    }
    return TwoModalityData(**(made | fields))


def read(data: TwoModalityDataSet, start: int, count: int) -> dict[str, np.ndarray]:
    batches = list(itertools.islice(data.train_batches(start_example=start), count))
    return {name: np.concatenate([b.arrays()[name] for b in batches]) for name in batches[0].arrays()}


def test_the_schema_is_known_without_images_or_text(tmp_path: pathlib.Path) -> None:
    schema = make(tmp_path).schema()
    assert (schema.vocabulary, schema.length) == (320 + 2 + 32, 128)
    assert (schema.modalities, schema.capacities) == (("text", "image"), (89, 89))
    assert (schema.capacity(0), schema.capacity(1)) == (89, 89)
    assert make(tmp_path, image_share=(0.2, 0.5)).schema().capacities == (102, 64)
    assert make(tmp_path, vocabulary=512).schema().vocabulary == 512
    assert not list(tmp_path.iterdir())


def test_batches_are_those_of_the_schema(folder: pathlib.Path) -> None:
    data = make(folder).build()
    assert data.schema == make(folder).schema()
    batch = next(data.train_batches(start_example=0))
    assert {name: (a.shape, a.dtype.name) for name, a in batch.arrays().items()} == {
        "tokens": ((6, 128), "int32"),
        "targets": ((6, 128), "int32"),
        "weights": ((6, 128), "float32"),
        "segment_ids": ((6, 128), "int32"),
        "positions": ((6, 128), "int32"),
        "modality": ((6, 128), "int8"),
    }


def parts(data: TwoModalityData, batch: TokenBatch) -> tuple[str, list[np.ndarray]]:
    """The text of a batch, marks as < and >, and the codes of its images."""
    ids, tokenizer = data.ids(), data.tokenizer.build()
    flat = batch.tokens[batch.segment_ids > 0]
    codes = flat[flat >= ids.first_code] - ids.first_code
    marks = {ids.begin_image: "<", ids.end_image: ">"}
    text = "".join(marks.get(i) or tokenizer.decode([i]) for i in flat.tolist() if i < ids.first_code)
    return text, list(codes.reshape(-1, 49))


def test_rows_hold_the_images_of_their_split_with_their_captions(folder: pathlib.Path) -> None:
    config = make(folder, caption="before")
    data = config.build()
    assert {split: len(found) for split, found in data.images.items()} == {"train": 243, "validation": 34, "test": 23}
    names = data.images["train"].names
    for split in ("train", "validation", "test"):
        known = data.codebook.encode(data.images[split].pixels)
        where = {code.tobytes(): names[label] for code, label in zip(known, data.images[split].labels, strict=True)}
        for batch in data.eval_batches(split):
            text, codes = parts(config, batch)
            captions = re.findall(r"\n(\w+)\n<>", text)
            assert len(captions) == len(codes)
            for code, caption in zip(codes, captions, strict=True):
                assert where[code.astype(np.int32).tobytes()] == caption


def test_no_split_has_an_image_or_a_text_of_another(folder: pathlib.Path) -> None:
    data = make(folder).build()
    pixels = {split: {image.tobytes() for image in found.pixels} for split, found in data.images.items()}
    assert sum(len(found) for found in data.images.values()) == 300
    assert sum(map(len, pixels.values())) == 280  # copies are in the split of what they are copies of
    for a, b in itertools.combinations(pixels, 2):
        assert not pixels[a] & pixels[b]
    whole = (folder / "text.txt").read_text()
    config = make(folder, image_share=(0.0, 0.0))
    for split, (start, stop) in {
        "train": (0, 32_000),
        "validation": (32_000, 36_000),
        "test": (36_000, 40_000),
    }.items():
        batches = config.build().eval_batches(split)
        for row in (row for batch in batches for row in batch.tokens[batch.segment_ids[:, 0] > 0]):
            assert bytes(row.tolist()).decode() in whole[start:stop]


def test_a_run_goes_on_to_the_bit_in_batches_of_any_size(folder: pathlib.Path) -> None:
    whole = read(make(folder).build(), 0, 20)
    for data, start, count in (
        (make(folder, threads=5).build(), 60, 10),
        (make(folder, batch_size=3).build(), 60, 20),
        (make(folder).build().with_batch_size(12), 60, 5),
    ):
        for name, array in read(data, start, count).items():  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(array, whole[name][60:], err_msg=name)


def test_data_made_elsewhere_are_the_same(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    here, there = make(folder).build(), make(folder, folder=str(tmp_path)).build()
    assert here.fingerprint() == there.fingerprint()
    assert here.codebook.digest() == there.codebook.digest()
    assert make(folder, seed=1).build().fingerprint() != here.fingerprint()
    assert make(folder, batch_size=2, threads=1).build().fingerprint() == here.fingerprint()


def test_other_codes_of_the_same_images_are_other_data(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make(folder).build().fingerprint()
    train = two_modality.train_codebook

    def turned(*args: Any, **more: Any) -> PatchCodebook:
        return PatchCodebook(train(*args, **more).centres[::-1].copy())

    monkeypatch.setattr(two_modality, "train_codebook", turned)
    assert make(folder, folder=str(folder / "elsewhere")).build().fingerprint() != before


def test_the_codebook_is_trained_once_and_on_training_images_alone(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[np.ndarray] = []
    train = two_modality.train_codebook

    def noted(pixels: np.ndarray, *args: Any, **more: Any) -> PatchCodebook:
        trained.append(pixels)
        return train(pixels, *args, **more)

    monkeypatch.setattr(two_modality, "train_codebook", noted)
    data = make(folder, folder=str(tmp_path)).build()
    again = make(folder, folder=str(tmp_path), length=200, caption="none").build()
    assert len(trained) == 1
    np.testing.assert_array_equal(trained[0], data.images["train"].pixels)
    assert again.codebook.digest() == data.codebook.digest()
    (kept,) = tmp_path.glob("codebook-*")
    (kept / "centres").write_bytes(bytes(32 * 16))
    with pytest.raises(UserError, match="is damaged"):
        make(folder, folder=str(tmp_path)).build()


def test_what_a_run_keeps_draws_its_images(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = make(folder)
    data = config.build()
    (tmp_path / "codebook.npz").write_bytes(data.files()["codebook.npz"])
    kept = PatchCodebook.read(tmp_path / "codebook.npz")
    _, codes = parts(config, next(data.train_batches(start_example=0)))
    drawn = kept.decode(np.stack(codes))
    originals = data.images["train"].pixels
    nearest = [((originals.astype(int) - image) ** 2).mean((1, 2)).min() for image in drawn.astype(int)]
    assert max(nearest) < 4 * data.codebook.error(originals)
    (picture,) = data.pictures()
    assert picture[:2] == ("validation", "reconstructions")
    error = data.codebook.error(data.images["validation"].pixels)
    assert f"squared error of a pixel {error:.0f} of 255²" in picture[2]
    assert picture[3].startswith("<svg")
    assert f"{error:.0f} (validation)" in data.remarks[0]


def test_characters_are_text_as_well(folder: pathlib.Path) -> None:
    alphabet = "abcdefghijklmnopqrstuvwxyz\n"
    data = make(folder, tokenizer=CharacterTokenizer(alphabet=alphabet))
    assert data.schema().vocabulary == 27 + 2 + 32
    text, codes = parts(data, next(data.build().train_batches(start_example=0)))
    assert re.fullmatch(r"[a-z\n<>]+", text)
    assert len(codes) == 6  # one a row: two of 51 and 12 have no room beside each other
    with pytest.raises(UserError, match=r"character '\\n'"):
        make(folder, tokenizer=CharacterTokenizer(alphabet=alphabet[:-1])).build()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"image_share": None}, r"data\.image_share=None: wanted two shares"),
        ({"image_share": (0.7, 0.3)}, r"data\.image_share=\(0\.7, 0\.3\): wanted two shares"),
        ({"image_share": (0.0, 1.5)}, "wanted two shares"),
        ({"caption": "above"}, r"data\.caption must be one of before, after, either, none; got 'above'"),
        ({"image_marks": "none"}, r"data\.image_marks must be one of text, image"),
        ({"codes": 0}, r"data\.codes must be at least 1"),
        ({"length": 0}, r"data\.length must be at least 1"),
        ({"vocabulary": 350}, r"data\.vocabulary=350 is too small: .* 354 ids \(text \[0, 322\), image \[322, 354\)\)"),
        ({"split": Fractions()}, r"data\.split\.by='random'"),
        ({"split": Fractions(train=0.0, by="position")}, "none of 300 images is in the training split"),
        ({"length": 60, "image_share": (0.3, 0.7)}, r"data\.image_share=\(0\.3, 0\.7\): no row of data\.length=60"),
        ({"codes": 5000}, "distinct patches"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: pathlib.Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(folder, **fields).build()


def test_rows_that_cannot_be_full_are_told(folder: pathlib.Path) -> None:
    data = make(folder, image_share=(1.0, 1.0), image_marks="image", caption="none").build()
    assert "Rows have 102 tokens and 26 positions of padding" in data.remarks[1]
    assert len(make(folder).build().remarks) == 1


@pytest.mark.slow
def test_digits_and_shakespeare_need_no_file(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is of the extra test")
    config = TwoModalityData(images=Digits(), folder=str(tmp_path), batch_size=4)
    data = config.build()
    assert data.num_examples("train") > 400
    text, codes = parts(config, next(data.train_batches(start_example=0)))
    assert len(codes) >= 8
    assert re.search(r"\n(zero|one|two|three|four|five|six|seven|eight|nine)\n", text)
    assert data.codebook.error(data.images["test"].pixels) < 400
    assert dataclasses.replace(config, batch_size=2).build().fingerprint() == data.fingerprint()


def rows_of(data: Any, start: int, count: int, **where: int) -> list[TokenBatch]:
    return list(itertools.islice(data.train_batches(start_example=start, **where), count))


def test_a_mixture_of_images_among_text_goes_on_at_the_same_bits(folder: pathlib.Path) -> None:
    sources = make(folder, caption="before"), make(folder, caption="after")
    data = MixtureData(sources=tuple(zip(sources, (1.0, 2.0), strict=True)), batch_size=6)
    assert data.schema() == sources[0].schema()
    built = data.build()
    whole = rows_of(built, 0, 8)
    source, position = Interleave((1.0, 2.0)).rows(0, 48)
    alone = [each.build().examples for each in sources]
    for row, (k, j) in enumerate(zip(source.tolist(), position.tolist(), strict=True)):
        for name, array in alone[k].stream(j, j + 1).arrays().items():
            np.testing.assert_array_equal(whole[row // 6].arrays()[name][row % 6], array[0])
    assert {name for batch in whole for name in batch.arrays()} >= {"modality"}
    for process in range(2):
        for batch, again in zip(
            whole[3:], rows_of(data.build(), 18, 5, process_index=process, process_count=2), strict=True
        ):
            for name, array in again.arrays().items():
                np.testing.assert_array_equal(array, batch.arrays()[name][3 * process : 3 * process + 3])
    assert built.files() == sources[0].build().files()
    assert [name for _, name, _, _ in built.pictures()] == ["reconstructions"]
    assert len(built.remarks) == len(sources[0].build().remarks)
    held = list(built.eval_batches("validation"))
    assert all(batch.modality is not None for batch in held)


def test_sources_of_a_mixture_that_differ_in_capacities_alone_are_named_with_both(folder: pathlib.Path) -> None:
    wide = make(folder, image_share=(0.2, 0.8))
    with pytest.raises(UserError, match=r"sources\[1\] .*capacities=\(102, 102\).*sources\[0\].*capacities=\(89, 89\)"):
        MixtureData(sources=((make(folder), 1.0), (wide, 1.0))).schema()
    with pytest.raises(UserError, match="image_share alike"):
        MixtureData(sources=((make(folder), 1.0), (wide, 1.0))).build()
    text = TextData(path=str(folder / "text.txt"), length=128, vocabulary=354, folder=str(folder / "kept"))
    with pytest.raises(UserError, match="sources of a mixture must agree"):
        MixtureData(sources=((make(folder), 1.0), (text, 1.0))).schema()


def test_sources_with_other_codebooks_are_refused(folder: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"data.sources\[1\] has another codebook.npz than data.sources\[0\]"):
        MixtureData(sources=((make(folder), 1.0), (make(folder, seed=1), 1.0))).build()


@pytest.mark.slow
def test_stages_of_images_among_text_go_on_at_the_same_bits(folder: pathlib.Path) -> None:
    short = make(folder)
    stages = (
        Stage(from_tokens=0, data=short),
        Stage(from_tokens=128 * 12, data=dataclasses.replace(short, batch_size=4)),
        Stage(from_tokens=128 * 20, data=dataclasses.replace(short, length=256, batch_size=2)),
    )
    data = StagedData(stages=stages)
    assert data.schema() == stages[2].data.schema()
    whole = rows_of(data.build(), 0, 8)
    assert [batch.tokens.shape for batch in whole] == [(6, 128)] * 2 + [(4, 128)] * 2 + [(2, 256)] * 4
    for step in range(1, 8):
        seen = sum(map(len, whole[:step]))
        for batch, again in zip(whole[step:], rows_of(data.build(), seen, 8 - step), strict=True):
            for name, array in again.arrays().items():
                np.testing.assert_array_equal(array, batch.arrays()[name])
    assert data.build().files() == short.build().files()
    wide = dataclasses.replace(short, image_share=(0.0, 1.0), length=192)
    more = StagedData(stages=(Stage(from_tokens=0, data=wide), *stages[2:]))
    with pytest.raises(UserError, match=r"stages.0 has up to 192 tokens of text .* data.stages.1, .* up to 179"):
        more.schema()
    text = TextData(path=str(folder / "text.txt"), vocabulary=354)
    with pytest.raises(UserError, match=r"stages.1 has tokens of text, data.stages.0 of text, image"):
        StagedData(stages=(stages[0], Stage(from_tokens=9999, data=text))).schema()
