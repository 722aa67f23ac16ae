"""A folder with a manifest shows every change of its files, and one of an older version can still be read."""

import json
from pathlib import Path

import pytest

from rally.util import checksums
from rally.util.checksums import MANIFEST, ManifestError, damage, has_checksums, read_manifest, seal, weights_damage


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose large file has three pieces, the last of them short."""
    monkeypatch.setattr(checksums, "PIECE", 1000)
    monkeypatch.setattr(checksums, "BUFFER", 300)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "state.json").write_text("{}", encoding="utf-8")
    (tmp_path / "empty").touch()
    seal(tmp_path)
    return tmp_path


def flip(file: Path, place: int, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= bit
    file.write_bytes(content)


def test_every_file_is_listed_and_nothing_is_wrong(sealed: Path) -> None:
    assert damage(sealed) is None and has_checksums(sealed)
    listed = read_manifest(sealed)
    assert set(listed) == {"actor/model.safetensors", "state.json", "empty"}
    assert len(listed["actor/model.safetensors"].crc32 or ()) == 3 and listed["empty"].crc32 == ()


@pytest.mark.parametrize("place", [0, 299, 300, 999, 1000, 1999, 2000, -1])
def test_one_flipped_bit_is_found_wherever_it_is(sealed: Path, place: int) -> None:
    flip(sealed / "actor" / "model.safetensors", place, bit=64)
    assert damage(sealed) == "actor/model.safetensors was changed after it was written: its checksum differs"
    assert weights_damage(sealed / "actor") == damage(sealed)
    assert damage(sealed, contents=False) is None, "without reading it nobody can tell"
    assert damage(sealed, only=lambda name: name != "actor/model.safetensors") is None


def test_no_flipped_bit_of_the_manifest_goes_unnoticed_unless_it_changes_nothing(sealed: Path) -> None:
    file = sealed / MANIFEST
    text, meaning = file.read_bytes(), read_manifest(sealed)
    for place in range(len(text)):
        flip(file, place)
        assert damage(sealed) is not None or read_manifest(sealed) == meaning, text[:place]
        file.write_bytes(text)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "3", '"a"', "{}", '{"a": true}', '{"a": "1"}', '{"../a": 1}', '{"/a": 1}', "[" * 100_000, "\0"],
)
def test_a_manifest_of_another_form_is_unreadable(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(ManifestError, match=r"it has no readable manifest\.json \("):
        read_manifest(tmp_path)
    assert damage(tmp_path) is not None and weights_damage(tmp_path) is None


def test_a_manifest_of_an_older_version_has_sizes_alone(sealed: Path) -> None:
    sizes = {name: record.size for name, record in read_manifest(sealed).items()}
    (sealed / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
    assert damage(sealed) is None and not has_checksums(sealed)
    (sealed / "state.json").write_text("{ }", encoding="utf-8")
    assert damage(sealed) == "state.json has 3 bytes instead of 2"


def test_a_folder_in_the_place_of_a_file_is_damage(sealed: Path) -> None:
    (sealed / "state.json").unlink()
    (sealed / "state.json").mkdir()
    assert damage(sealed) == "state.json is missing"
