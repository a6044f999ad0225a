"""The manifest: what is damaged, missing, replaced or stale is never taken for what it should be."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline import TINY, one_thread

from curvssl import files, manifest
from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data.arrays import ArrayImages, open_array
from curvssl.data.named import Dataset, changed_since, describe, load
from curvssl.data.pack import pack
from curvssl.manifest import Manifest, Wrong, seal, sealed
from curvssl.rundir import Run
from curvssl.train.loop import pretrain
from curvssl.verify import verify


class Killed(BaseException):
    """The process ends here; nothing that follows is run."""


def of(folder: Path) -> Manifest:
    return Manifest(folder / "manifest.json", folder)


def keep(folder: Path, name: str, content: bytes, *sources: str) -> None:
    of(folder).keep(name, lambda file: file.write(content), of=sources, by=f"curvssl make-{name} RUN")


def test_a_file_comes_back_and_one_that_changed_is_named_with_the_command_that_makes_it_again(tmp_path: Path):
    keep(tmp_path, "a", b"one")
    assert of(tmp_path).content("a") == b"one"
    (tmp_path / "a").write_bytes(b"two")
    with pytest.raises(Wrong, match=f"{tmp_path}/a has changed since .*: curvssl make-a {tmp_path} makes it again"):
        of(tmp_path).content("a")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(b""), "has changed"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has changed"),
        (lambda file: (file.unlink(), file.mkdir()), "is no file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is no file"),
        (lambda file: (file.unlink(), file.symlink_to("nowhere")), "is missing"),
    ],
)
def test_every_kind_of_damage_is_told(tmp_path: Path, damage: Callable[[Path], object], said: str):
    keep(tmp_path, "a", b"one")
    damage(tmp_path / "a")
    for look in (of(tmp_path).content, of(tmp_path).check):
        with pytest.raises(Wrong, match=said):
            look("a")


def test_each_flipped_bit_of_file_and_manifest_is_told_or_changes_nothing(tmp_path: Path):
    keep(tmp_path, "a", b"what it was made from")
    keep(tmp_path, "b", b"what was made", "a")
    told = 0
    for file in (tmp_path / "b", tmp_path / "manifest.json"):
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 5):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                found = of(tmp_path).content("b")
            except UserError:
                told += 1
            else:
                assert found == b"what was made"
        file.write_bytes(whole)
    assert told > 200
    assert of(tmp_path).content("b") == b"what was made"


def test_what_was_made_from_something_older_is_stale(tmp_path: Path):
    keep(tmp_path, "a", b"old")
    keep(tmp_path, "b", b"of old", "a")
    keep(tmp_path, "a", b"new")
    with pytest.raises(Wrong, match=r"b was made from another a: curvssl make-b"):
        of(tmp_path).content("b")
    keep(tmp_path, "b", b"of new", "a")
    assert of(tmp_path).content("b") == b"of new"


def test_a_kill_at_any_moment_of_a_write_leaves_the_old_file_or_the_new_one_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every call to the system that changes a file is where a process may end."""
    seen = set()
    for moment in range(20):
        folder = tmp_path / str(moment)
        folder.mkdir()
        keep(folder, "a", b"old")
        left, replace = [moment], os.replace

        def dying(
            *arguments: object, left: list[int] = left, call: Callable[..., None] = replace, **rest: object
        ) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            call(*arguments, **rest)
            if left[0] == 0:
                raise Killed
            left[0] -= 1

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", dying)
            try:
                keep(folder, "a", b"new")
                finished = True
            except Killed:
                finished = False
        found = of(folder).content("a")
        assert found == (b"new" if finished else (folder / "a").read_bytes())
        seen.add((found, finished))
        keep(folder, "a", b"newer")
        assert of(folder).content("a") == b"newer"
        if finished:
            break
    assert seen == {(b"old", False), (b"new", False), (b"new", True)}


def test_a_newer_format_asks_for_an_update(tmp_path: Path):
    keep(tmp_path, "a", b"one")
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace(f'"format": {manifest.FORMAT}', '"format": 99'))
    with pytest.raises(UserError, match=r"manifest\.json was written by a newer version: update curvssl"):
        of(tmp_path).content("a")


def test_a_sealed_json_is_read_whatever_its_layout_and_refused_when_a_number_changes(tmp_path: Path):
    file, value = tmp_path / "cell.json", {"accuracy": 93.25, "nothing": float("nan"), "names": ["é", "\udce9"]}
    file.write_text(json.dumps(seal(value), indent=7))
    assert sealed(file, remedy="")["accuracy"] == 93.25
    file.write_text(file.read_text().replace("93.25", "93.75"))
    with pytest.raises(Wrong, match="has changed since it was written: mend it"):
        sealed(file, remedy="mend it")
    files.write_json(file, value)
    with pytest.raises(Wrong, match=f"has no checksum: take it as it is: curvssl verify {file} --accept"):
        sealed(file, remedy="mend it")
    main(["verify", str(file), "--accept"])
    assert sealed(file, remedy="")["accuracy"] == 93.25


# ---- a run directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with one_thread():
        return pretrain(TINY, out=tmp_path_factory.mktemp("runs") / "run", progress=False).path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Run:
    return Run.read(shutil.copytree(made, tmp_path / "run"))


def test_a_run_without_a_manifest_says_what_to_do_and_is_taken_as_it_is(run: Run, capsys: pytest.CaptureFixture[str]):
    kept = run.manifest.entries()
    run.keep_json("probes.json", {"linear": {"mean": 1.0}}, by="curvssl probe RUN")
    (run.path / "manifest.json").unlink()
    (run.path / "quality.json").write_bytes(b"cut o")
    with pytest.raises(UserError, match=f"as it is: curvssl verify {run.path} --accept"):
        Run.read(run.path)
    main(["verify", str(run.path), "--accept"])
    again = Run.read(run.path).manifest.entries()
    assert {name: entry["sha256"] for name, entry in again.items() if name in kept} == {
        name: entry["sha256"] for name, entry in kept.items()
    }
    assert again["encoder.safetensors"]["from"] == kept["encoder.safetensors"]["from"]
    assert run.stored_json("probes.json") == {"linear": {"mean": 1.0}}
    assert run.stored_json("quality.json") == {}
    assert "quality.json is damaged" in capsys.readouterr().err


def test_verify_names_each_wrong_file_in_one_line_and_exits_with_two(run: Run, capsys: pytest.CaptureFixture[str]):
    main(["verify", str(run.path)])
    assert "files are as they were written" in capsys.readouterr().out
    for name in ("encoder.safetensors", "metrics.jsonl"):
        with open(run.path / name, "ab") as file:
            file.write(b" ")
    (run.path / "provenance.json").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run.path)])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "encoder.safetensors has changed" in "".join(lines)
    assert "the same curvssl pretrain command makes it again" in "".join(lines)
    assert "provenance.json is missing" in "".join(lines)


def test_without_its_configuration_a_run_goes_on_as_itself_or_not_at_all(run: Run, capsys: pytest.CaptureFixture[str]):
    (run.path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing: the same curvssl pretrain command makes it again"):
        Run.create(run.path, dataclasses.replace(TINY, method="vicreg"))
    assert Run.create(run.path, TINY).config == Run.read(run.path).config == TINY
    assert "config.json is missing, and is written again" in capsys.readouterr().err
    (run.path / "config.json").unlink()
    (run.path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"holds files of a run, and no config\.json"):
        Run.create(run.path, dataclasses.replace(TINY, method="vicreg"))


def test_features_of_an_older_encoder_are_not_shown(run: Run, capsys: pytest.CaptureFixture[str]):
    run.keep_arrays("features-test.npz", by="curvssl probe RUN", h=np.zeros((3, 2)))
    assert run.stored_arrays("features-test.npz") is not None
    net = run.load_net()
    with torch.no_grad():
        next(net.encoder.parameters()).add_(1)
    run.save_net(net, channels=3)
    assert run.stored_arrays("features-test.npz") is None
    assert "features-test.npz was made from another encoder.safetensors, and is made again" in capsys.readouterr().err


def test_a_flipped_bit_of_the_encoder_is_mended_by_the_same_command_and_the_flipped_file_stays(run: Run, made: Path):
    file = run.path / "encoder.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(UserError, match=r"encoder\.safetensors has changed since it was written"):
        run.load_net()
    assert not run.finished
    with one_thread():
        pretrain(TINY, out=run.path, progress=False)
    assert file.read_bytes() == (made / "encoder.safetensors").read_bytes()
    assert (run.path / "encoder.safetensors.damaged").read_bytes() == bytes(damaged)


def test_rows_that_the_metrics_lost_come_back_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run.create(tmp_path, TINY)
    rows = [{"step": 10, "loss": 0.1}, {"step": 20, "loss": float("nan")}]
    for row in rows:
        run.append_metrics(row)
    run.save_checkpoint({"step": 20, "metrics": rows})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for damage in (whole.replace(b"0.1", b"0.9"), whole[:-30], b""):
        (tmp_path / "metrics.jsonl").write_bytes(damage)
        state = run.load_checkpoint()
        assert state is not None
        run.rewind_metrics(20, state["metrics"])
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole
        assert "is written again from the checkpoint" in capsys.readouterr().err
        assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damage
    run.rewind_metrics(20, rows)
    assert capsys.readouterr().err == ""


def test_a_flipped_bit_of_a_checkpoint_goes_back_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run.create(tmp_path, TINY)
    for step in (1, 2):
        run.save_checkpoint({"step": step, "net": torch.zeros(1000)})
    damaged = bytearray((tmp_path / "checkpoint-2.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1  # in the middle of the zeros: torch would load it
    (tmp_path / "checkpoint-2.pt").write_bytes(damaged)
    state = run.load_checkpoint()
    assert state is not None
    assert state["step"] == 1
    assert "checkpoint-2.pt has changed since it was written" in capsys.readouterr().err
    assert (tmp_path / "checkpoint-2.pt.damaged").read_bytes() == bytes(damaged)


# ---- a pack, and other own images


@pytest.fixture
def pixels(tmp_path: Path) -> Path:
    """A folder of forty images in two classes."""
    for i in range(40):
        file = tmp_path / "in" / "ab"[i % 2] / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), i, dtype=np.uint8)).save(file)
    return tmp_path / "in"


def test_every_image_of_a_pack_is_compared_when_it_is_read(pixels: Path, tmp_path: Path):
    out, _ = pack(pixels, tmp_path / "x.npy", size=8, progress=False)
    assert verify(out) == 40
    whole = out.read_bytes()
    for place in (150, -1):  # in the first image, and in the last one
        flipped = bytearray(whole)
        flipped[place] ^= 1
        out.write_bytes(flipped)
        row = 0 if place > 0 else 39
        with pytest.raises(UserError, match=rf"^image {row} of .*x\.npy has changed since it was packed: pack the"):
            for _ in ArrayImages.of(open_array(out)).batches([torch.arange(40)], workers=2):
                pass
    out.write_bytes(whole[:-64].replace(b"(40, ", b"(39, "))
    with pytest.raises(UserError, match=r"x\.npy has changed since it was packed"):
        open_array(out)


def test_a_pack_without_its_labels_or_its_manifest_is_no_plain_array(pixels: Path, tmp_path: Path):
    out, _ = pack(pixels, tmp_path / "x.npy", size=8, progress=False)
    labels = out.with_suffix(".labels.npz")
    kept = labels.read_bytes()
    labels.unlink()
    with pytest.raises(UserError, match=rf"x\.labels\.npz is missing: curvssl pack FOLDER {out} makes it again"):
        open_array(out)
    labels.write_bytes(kept)
    out.with_suffix(".manifest.json").unlink()
    with pytest.raises(UserError, match=r"x\.manifest\.json of this pack is missing"):
        open_array(out)
    assert verify(out, accept=True) == 40


def test_own_images_that_changed_are_noticed_without_reading_all_of_them(
    pixels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def data() -> Dataset:
        return load(f"folder:{pixels}", size=8)

    known = json.loads(json.dumps(describe(data())))
    assert changed_since(known, data()) == ""
    os.utime(pixels / "a" / "00.png", ns=(0, 0))
    capsys.readouterr()
    assert changed_since(known, data()) == ""
    assert "were written to since the run began" in capsys.readouterr().err
    with open(pixels / "a" / "00.png", "ab") as file:  # its pixels are the same
        file.write(b"more")
    assert changed_since(known, data()).startswith("sizes, times differ")


def test_labels_and_test_rows_of_an_array_are_part_of_what_it_is(tmp_path: Path):
    file, images = tmp_path / "x.npz", np.arange(50 * 16, dtype=np.uint8).reshape(50, 4, 4)
    labels = np.arange(50) % 2
    np.savez(file, images=images, labels=labels)
    known = json.loads(json.dumps(describe(load(f"array:{file}"))))
    np.savez(file, images=images, labels=1 - labels)
    assert changed_since(known, load(f"array:{file}")).startswith("labels differ")
    row = int(load(f"array:{file}").test.images.rows[0])
    images[row] ^= 1
    np.savez(file, images=images, labels=labels)
    assert changed_since(known, load(f"array:{file}")).startswith("pixels differ")
