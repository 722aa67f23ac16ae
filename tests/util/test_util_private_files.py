"""What a run writes can be read by its user alone, or by those who can read the folder that the user made for it."""

import os
import stat
from pathlib import Path

import pytest
from train_cases import Paper, run_config

from rally.runs.build.rollout import rollout_cache_dir
from rally.runs.train import train
from rally.types import RallyError
from rally.util.locks import hold
from rally.util.private_files import own_folder, permissions_of, private_folder

ONE_STEP = ("trainer.total_training_steps=1", "data.val_files=null")


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    """The permissions of a folder and everything in it that others have."""
    return {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.rglob("*"))}


@pytest.mark.drill("security", "Another user of the machine reads a run folder", "Its permissions refuse it")
def test_a_new_run_folder_is_private_in_all_its_parts(home: Path, tmp_path: Path) -> None:
    cached = ("actor_rollout_ref.rollout.skip_rollout=true", f"actor_rollout_ref.rollout.skip_dump_dir={tmp_path}/dump")
    train(run_config(home, tmp_path / "run", *ONE_STEP, *cached), Paper().console)
    assert (tmp_path / "run" / "checkpoints" / "global_step_1" / "actor" / "model.safetensors").exists()
    assert modes(tmp_path / "run") == {0} and modes(tmp_path / "dump") == {0}
    assert os.umask(0o022) == 0o022, "the umask is as it was"


def test_a_folder_that_the_user_shared_keeps_its_permissions(home: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o770)
    train(run_config(home, tmp_path / "run", *ONE_STEP), Paper().console)
    assert modes(tmp_path / "run") <= {0o070, 0o060}


def test_new_files_have_the_permissions_of_the_folder(tmp_path: Path) -> None:
    for mode, expected in ((0o700, 0o600), (0o750, 0o640), (0o2770, 0o660), (0o755, 0o644)):
        folder = private_folder(tmp_path / f"{mode:o}")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(mode)
        with permissions_of(folder):
            (folder / "file").touch()
        assert stat.S_IMODE((folder / "file").stat().st_mode) == expected


def test_the_cache_of_episodes_is_in_the_users_own_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = run_config(home, tmp_path / "run", "actor_rollout_ref.rollout.skip_rollout=true")
    assert rollout_cache_dir(config).is_relative_to(tmp_path / "cache" / "rally" / "rollout_dump")


@pytest.mark.drill("security", "Another user prepares a folder of cached episodes", "It is refused")
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder(tmp_path / "mine", "the.key")
    if os.geteuid() == 0:
        os.chown(tmp_path / "mine", 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RallyError, match=r"belongs to another user, .*; set the.key to another folder"):
        own_folder(tmp_path / "mine", "the.key")


@pytest.mark.drill("security", "A lock file in /tmp is a symbolic link", "It is not followed")
def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    assert hold(tmp_path / "lock") is None
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "lock").is_symlink()
