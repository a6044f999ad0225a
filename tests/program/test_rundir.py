"""Run directories: files, checkpoints, locks, provenance."""

import dataclasses
import json
import os
import resource
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from pipeline import TINY

import curvssl
from curvssl.config import UserError
from curvssl.files import lock, new_folder, write_atomic, write_bytes, write_json
from curvssl.rundir import Run, commit, provenance


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path: Path):
    file = tmp_path / "file"
    write_bytes(file, b"old")

    def fail(part: object) -> None:
        part.write(b"half")  # type: ignore[attr-defined]
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write_atomic(file, fail)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_cannot_be_names_the_file_and_a_device_is_not_replaced(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: '[^']*/folder'"):
        write_bytes(tmp_path / "folder", b"new")
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(OSError, match="is a device, not a file"):
        write_bytes(tmp_path / "null", b"new")
    assert (tmp_path / "null").is_char_device()
    full = OSError("512 requested and 0 written")  # as numpy says it
    with pytest.raises(OSError, match=r"512 requested and 0 written: is the disk full\?: '[^']*/x\.npy'"):
        write_atomic(tmp_path / "x.npy", lambda file: raised(full))


def raised(error: Exception) -> None:
    raise error


def test_a_disk_that_is_full_while_a_checkpoint_is_written_is_the_systems_error_with_the_files_name(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    run.save_checkpoint({"step": 3})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (5_000, 100_000, 400_500):  # of 401,000: torch's own error for it says nothing
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            with pytest.raises(OSError, match=r"File too large: '.*checkpoint-7\.pt'"):
                run.save_checkpoint({"step": 7, "net": torch.zeros(100_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint-3.pt", "config.json", "manifest.json"]
    assert run.load_checkpoint() == {"step": 3}


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path):
    stale = [tmp_path / name for name in (".checkpoint-12.pt.1.part", ".a\nb.2.part", ".x.npy.3.part")]
    for part in stale:
        part.write_bytes(b"killed while writing")
    others = [tmp_path / name for name in (".movie.part", "x.npy.3.part", ".x.npy.old.part")]
    for other in others:
        other.touch()
    os.mkfifo(tmp_path / ".pipe.4.part")

    def write(file: BinaryIO) -> None:
        assert not stale[2].exists()  # of the same file
        assert stale[0].exists()  # of another one: perhaps its writer only has no lock
        with lock(tmp_path):
            assert not any(part.exists() for part in stale)
        file.write(b"alive")

    write_atomic(tmp_path / "x.npy", write)
    assert (tmp_path / "x.npy").read_bytes() == b"alive"
    assert all(other.exists() for other in others)


def test_a_folder_that_a_killed_process_left_half_made_goes_and_that_of_a_living_one_stays(tmp_path: Path):
    dead, alive = (tmp_path / f".export.{process}.part" for process in (2**22 + 1, os.getppid()))  # above all numbers
    for folder in (dead, alive, tmp_path / "export"):
        folder.mkdir()
        (folder / "old").touch()
    with new_folder(tmp_path / "export") as part:
        (part / "new").touch()
        assert (tmp_path / "export" / "old").exists()
    assert [file.name for file in (tmp_path / "export").iterdir()] == ["new"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [alive.name, "export"]


def test_a_run_remembers_its_configuration(tmp_path: Path):
    made = Run.create(tmp_path / "run", TINY)
    assert Run.read(tmp_path / "run") == made
    assert json.loads((tmp_path / "run" / "config.json").read_text())["augment"]["crop_scale"] == [0.6, 1.0]


def test_a_run_with_other_settings_is_refused_by_naming_them(tmp_path: Path):
    Run.create(tmp_path, TINY).append_metrics({"epoch": 1, "step": 10})
    with pytest.raises(UserError) as error:
        Run.create(
            tmp_path,
            dataclasses.replace(TINY, lr=0.5, augment=dataclasses.replace(TINY.augment, rotation=20)),
        )
    assert "lr 0.002 → 0.5; augment.rotation 10 → 20" in str(error.value)
    assert "use another --out" in str(error.value)
    assert Run.read(tmp_path).config == TINY


def test_what_does_not_decide_the_weights_may_change(tmp_path: Path):
    Run.create(tmp_path, TINY).append_metrics({"epoch": 1, "step": 10})
    changed = dataclasses.replace(TINY, checkpoint_seconds=1.0, device="cpu", step="eager")
    assert Run.create(tmp_path, changed).config == changed


def test_a_run_that_learned_nothing_yet_gives_way_to_other_settings(tmp_path: Path):
    Run.create(tmp_path, dataclasses.replace(TINY, dataset="digit"))
    Run.create(tmp_path, TINY)
    assert Run.read(tmp_path).config == TINY


def test_what_is_not_a_run_says_so(tmp_path: Path):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.json"):
        Run.read(tmp_path)
    Run.create(tmp_path, TINY)
    with pytest.raises(UserError, match=r"has no encoder\.safetensors yet: run its pretraining to the end"):
        curvssl.load_encoder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "[]", "\xff{", '{"epochs": 3', '{"epochs": "three"}', '{"epochs": 0}'),
        *('{"augment": {"flop": 1}}', '{"epoch": 3}'),
    ],
)
def test_a_broken_configuration_is_one_line_with_the_name_of_the_file(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        Run.read(tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_a_half_written_line_ends_the_metrics(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "loss": step / 3})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "lo')
    assert [row["step"] for row in run.metrics()] == [10, 20, 30]
    run.rewind_metrics(20)
    run.append_metrics({"step": 30})
    assert run.metrics() == [{"step": 10, "loss": 10 / 3}, {"step": 20, "loss": 20 / 3}, {"step": 30}]


def test_the_last_two_checkpoints_are_kept_and_a_truncated_one_falls_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = Run.create(tmp_path, TINY)
    for step in (8, 9, 10, 11):
        run.save_checkpoint({"step": step, "net": torch.full((1000,), float(step))})
    assert [file.name for file in run.checkpoints()] == ["checkpoint-10.pt", "checkpoint-11.pt"]
    newest = run.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    state = run.load_checkpoint()
    assert state is not None
    assert state["step"] == 10
    assert torch.equal(state["net"], torch.full((1000,), 10.0))
    assert "checkpoint-11.pt has changed since it was written" in capsys.readouterr().err
    names = sorted(file.name for file in tmp_path.glob("*checkpoint*"))
    assert names == ["checkpoint-10.pt", "checkpoint-11.pt.damaged"]  # nothing is deleted


def test_a_checkpoint_that_the_system_does_not_let_us_read_stops_the_run_and_stays(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    run.save_checkpoint({"step": 3})
    (tmp_path / "checkpoint-7.pt").symlink_to("checkpoint-7.pt")  # a real OSError, for root as well
    with pytest.raises(UserError, match=r"checkpoint-7.pt cannot be read .*: mend that; nothing was changed"):
        run.load_checkpoint()
    assert sorted(file.name for file in tmp_path.glob("checkpoint*")) == ["checkpoint-3.pt", "checkpoint-7.pt"]


def test_a_damaged_line_of_metrics_costs_that_line_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run.create(tmp_path, TINY)
    for step in (10, 20, 30):
        run.append_metrics({"step": step})
    file = tmp_path / "metrics.jsonl"
    damaged = file.read_bytes().replace(b'{"step": 20}', b'{"st\xffp": 20}')
    file.write_bytes(damaged)
    assert [row["step"] for row in run.metrics()] == [10, 30]
    run.rewind_metrics(30)
    assert [row["step"] for row in run.metrics()] == [10, 30]
    assert "1 of 3 lines of" in capsys.readouterr().err
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged


def test_a_named_pipe_called_metrics_keeps_nobody_waiting(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert run.metrics() == []
    run.rewind_metrics(20, rows=[{"step": 20}])
    assert run.metrics() == [{"step": 20}]


def test_a_file_that_is_no_checkpoint_by_its_name_is_the_users_own(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    run.save_checkpoint({"step": 3})
    others = ["checkpoint-best.pt", "checkpoint-3-copy.pt", "checkpoint-.pt", "checkpoint-４.pt"]
    for name in others:
        (tmp_path / name).touch()
    assert [file.name for file in run.checkpoints()] == ["checkpoint-3.pt"]
    run.save_checkpoint({"step": 4})
    assert run.load_checkpoint() == {"step": 4}
    assert all((tmp_path / name).exists() for name in others)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    assert run.load_checkpoint() is None
    (tmp_path / "checkpoint-3.pt").write_bytes(b"")
    assert run.load_checkpoint() is None


def test_a_checkpoint_runs_no_code_when_it_is_read(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    torch.save({"step": 3, "evil": Trap(tmp_path / "sprung")}, tmp_path / "checkpoint-3.pt")
    assert run.load_checkpoint() is None
    assert not (tmp_path / "sprung").exists()


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.file,))


def test_one_process_at_a_time_holds_a_run(tmp_path: Path):
    with lock(tmp_path), pytest.raises(UserError, match="another process trains in"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")  # which would keep a writer waiting for a reader
    with lock(tmp_path), pytest.raises(UserError, match="another process trains in"), lock(tmp_path):
        pass


def test_saved_networks_come_back_to_the_last_bit(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    net = run.make_net(channels=3)
    net(torch.randn(16, 3, 8, 8))  # changes the BatchNorms' buffers
    run.save_net(net, channels=3)
    back = run.load_net().state_dict()
    assert back.keys() == net.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in net.state_dict().items())


def test_provenance_names_the_versions_the_commit_and_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CURVSSL_COMMIT", "0123456789ab")
    facts = provenance(device="cpu")
    assert facts["commit"] == commit() == "0123456789ab"
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"command", "device", "platform", "cores", "created"} <= facts.keys()
    monkeypatch.setattr("sys.argv", ["/lib/curvssl/__main__.py", "pretrain", "--dataset", "folder:my photos"])
    assert provenance(device="cpu")["command"] == "curvssl pretrain --dataset 'folder:my photos'"
    write_json(tmp_path / "facts.json", facts)
    assert json.loads((tmp_path / "facts.json").read_text()) == facts
