"""A state file equals that of torch.save byte for byte; errors are raised, and no thread is left."""

import errno
import io
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model
from train_cases import files_of_at_most, small_policy, uneven_episodes
from transformers import PreTrainedTokenizerBase

from rally.chat import tiny_tokenizer
from rally.train.batch import build_batch
from rally.train.checkpoint.snapshot import write_state
from rally.train.checkpoint.store import CheckpointError, CheckpointStore, open_checkpoint
from rally.train.update import UpdateSettings, update_policy
from rally.util.background_threads import side_by_side

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda whole: whole,
    lambda whole: whole[3:],
    lambda whole: whole[::2],
    lambda whole: whole[:6].view(2, 3).t(),
    lambda whole: whole[4],
    lambda whole: whole[:0],
    lambda whole: whole.expand(2, -1),
    lambda whole: whole.clone(),
    lambda whole: whole.to("meta"),
    lambda whole: torch.nn.Parameter(whole, requires_grad=False),
)
NAMES = st.text(max_size=40)


@st.composite
def states(draw: st.DrawFn) -> Any:
    """Tensors that share a few storages in many ways, in containers of several kinds, among plain values."""
    bases = [
        torch.randint(0, 2, (draw(st.integers(6, 3000)),)).to(draw(st.sampled_from(DTYPES)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    tensors = st.builds(lambda view, base: view(base), st.sampled_from(VIEWS), st.sampled_from(bases))
    plain = st.none() | st.integers() | st.floats(allow_nan=False) | NAMES
    inner = st.lists(tensors | plain, max_size=4) | st.tuples(tensors, plain) | st.dictionaries(NAMES, tensors)
    return draw(st.dictionaries(NAMES, tensors | plain | inner, max_size=6))


@settings(max_examples=60, deadline=None)
@given(states())
def test_the_file_is_the_one_of_torch_save(state: Any) -> None:
    expected = io.BytesIO()
    torch.save(state, expected)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.pt"
        write_state(state, path)
        assert path.read_bytes() == expected.getvalue()
        for mapped in (False, True):
            assert repr(torch.load(path, weights_only=True, mmap=mapped)) == repr(state)
        assert zipfile.ZipFile(path).testzip() is None, "every checksum is right"


def test_tensors_that_shared_memory_share_it_again(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    write_state({"a": whole, "b": [whole], "tail": whole[6:]}, tmp_path / "trainer.pt")
    found = torch.load(tmp_path / "trainer.pt", weights_only=True)
    found["a"].fill_(7)
    assert found["b"][0].tolist() == [7] * 12 and found["tail"].tolist() == [7] * 6


def test_a_state_is_written_from_where_it_lies(tmp_path: Path) -> None:
    state = {"a": torch.ones(2**22), "b": torch.ones(2**22)}
    tracemalloc.start()
    try:
        write_state(state, tmp_path / "trainer.pt")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**20, "no second copy of a tensor"


def test_what_the_disk_refuses_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="No space left") as refused:
        write_state({"a": torch.ones(2**16)}, Path("/dev/full"))
    assert refused.value.errno == errno.ENOSPC and not _left_over()


def test_a_state_that_cannot_be_saved_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        write_state({"a": torch.ones(3), "b": lambda: 0}, tmp_path / "trainer.pt")
    assert not _left_over()


def _left_over() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rally-state"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_refuses_the_weights_is_told_in_a_sentence(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, background: bool
) -> None:
    store = CheckpointStore(tmp_path, background=background, warn=pytest.fail)
    store.save(1, small_policy(make_model()), tokenizer)
    store.wait()
    with files_of_at_most(50_000), pytest.raises(CheckpointError, match=r"step 2 cannot be written.*File too large"):
        store.save(2, small_policy(make_model()), tokenizer)
        store.wait()
    found = CheckpointStore(tmp_path, warn=lambda _: None).latest()
    assert found is not None and found.step == 1


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    policy = small_policy(make_model(), lr=1e-2)
    update_policy(policy, build_batch(uneven_episodes()), UpdateSettings(mini_batch_groups=2))
    folder = CheckpointStore(tmp_path, warn=pytest.fail).save(1, policy, tokenizer)
    resumed = small_policy(make_model())
    resumed.load_state(open_checkpoint(folder).state())
    with (folder / "trainer.pt").open("r+b") as file:
        file.write(b"\xff" * (folder / "trainer.pt").stat().st_size)
    for mine, theirs in zip(resumed.optimizer.state.values(), policy.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_all_have_ended_when_a_failure_is_raised() -> None:
    ended = []

    def slow() -> None:
        time.sleep(0.2)
        ended.append("slow")

    def fails() -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        side_by_side([fails, slow], "test")
    assert ended == ["slow"]


def test_where_no_thread_can_be_had_all_is_written_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def fails() -> None:
        raise OSError("refused")

    state = {"a": torch.ones(2**16), "b": [torch.arange(3)]}
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(OSError, match="refused"):
        side_by_side([fails, lambda: write_state(state, tmp_path / "trainer.pt")], "test")
    expected = io.BytesIO()
    torch.save(state, expected)
    assert (tmp_path / "trainer.pt").read_bytes() == expected.getvalue()


def test_a_program_that_ends_meanwhile_still_writes_all(tmp_path: Path) -> None:
    script = """if True:
        import sys, time
        from pathlib import Path
        import torch
        from rally.util.background_threads import BackgroundJobs, side_by_side
        from rally.train.checkpoint.snapshot import write_state

        def job():
            time.sleep(0.5)  # the main thread has ended by now
            side_by_side([lambda: write_state({"a": torch.ones(3)}, Path(sys.argv[1]))], "part")

        BackgroundJobs("test").start(job)
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "trainer.pt")], check=True, timeout=60)
    assert torch.load(tmp_path / "trainer.pt", weights_only=True)["a"].tolist() == [1, 1, 1]
