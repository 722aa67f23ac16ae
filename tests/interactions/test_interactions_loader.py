"""An interaction YAML becomes simulated users, each row gets its own, and every mistake is one error sentence."""

from pathlib import Path
from typing import Any

import pytest

from rally.interactions import BaseInteraction, Gsm8kInteraction, InteractionError, Interactions, load_interactions
from rally.types import Task

CLASSES = """
from rally.interactions import BaseInteraction

class TeacherInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, str(self.config["patience"]), 0.0, {}

class Mute(BaseInteraction):
    pass

class Angry(TeacherInteraction):
    def __init__(self, config):
        raise OSError("no")

class Stranger:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rally_test_users.py").write_text(CLASSES, encoding="utf-8")
    (tmp_path / "rally_test_foreign.py").write_text("import verl.interactions.weather", encoding="utf-8")
    return tmp_path


def load(folder: Path, text: str) -> list[BaseInteraction]:
    path = folder / "users.yaml"
    path.write_text(text, encoding="utf-8")
    return load_interactions(path)


def test_classes_beside_the_file_and_built_in_ones(folder: Path) -> None:
    users = load(
        folder,
        """
        interaction:
          - class_name: rally_test_users.TeacherInteraction
            config: {patience: 3}
          - class_name: rally_test_users.TeacherInteraction
            name: strict
          - name: gsm8k
            config: {max_tries: 2}
          - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
            name: maths
        """,
    )
    assert [user.name for user in users] == ["teacher", "strict", "gsm8k", "maths"]
    assert users[0].config == {"patience": 3, "name": "teacher"}
    built_in = users[2]
    assert isinstance(built_in, Gsm8kInteraction) and built_in.max_tries == 2
    assert isinstance(users[3], Gsm8kInteraction)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tools: []", "must have a list under the key `interaction`"),
        ("interaction: []", "must have a list under the key `interaction`"),
        ("interaction: [3]", "entry 1: an entry must be a mapping"),
        ("interaction: [{name: gsm8k, klass: x}]", "unknown key 'klass'; known are class_name, config, name"),
        ("interaction: [{name: nobody}]", "'nobody' is not a built-in one (gsm8k); for your own, write class_name"),
        ("interaction: [{name: gsm8k, config: 3}]", "config must be a mapping, not int"),
        ("interaction: [{name: gsm8k, config: {max_tries: 0}}]", "max_tries must be a whole number of at least 1"),
        ("interaction: [{name: gsm8k, config: {tries: 1}}]", "has no setting 'tries'; its only one is max_tries"),
        ("interaction: [{class_name: rally_test_users.Mute}]", "has no method generate_response; define one"),
        ("interaction: [{class_name: rally_test_users.Angry}]", "the constructor failed: OSError: no"),
        ("interaction: [{class_name: rally_test_users.Stranger}]", "must be a subclass of rally.interactions.Base"),
        ("interaction: [{class_name: rally_test_users.None_}]", "has no 'None_'"),
        ("interaction: [{class_name: rally_test_foreign.X}]", "lists the verl names that Rally provides"),
        ("interaction: [", "this is not valid YAML"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, text: str, told: str) -> None:
    with pytest.raises(InteractionError) as caught:
        load(folder, text)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InteractionError, match=r"the interaction config .* does not exist"):
        load_interactions("/nowhere/users.yaml")


def row(**kwargs: Any) -> Task:
    prompt = ({"role": "user", "content": "?"},)
    return Task(id="rows:3", data_source="test", prompt=prompt, interaction_kwargs=kwargs)


def test_a_row_finds_its_user() -> None:
    user = Gsm8kInteraction()
    users, nobody = Interactions([user]), Interactions()
    assert users.find(row(name="gsm8k", ground_truth="4")) is user
    assert users.find(row()) is None
    assert users.find(row(name=None, ground_truth=None)) is None, "columns of a table share their keys"
    assert nobody.find(row(query="?", ground_truth="4")) is None, "rows for tools bring these too"
    with pytest.raises(
        InteractionError, match=r"row rows:3 has interaction_kwargs without a name; write one of: gsm8k"
    ):
        users.find(row(ground_truth="4"))
    for these, known in ((users, "gsm8k"), (nobody, "none")):
        with pytest.raises(
            InteractionError, match=f"names the interaction 'maths', but the interactions are: {known}; add it"
        ):
            these.find(row(name="maths"))


def test_names_are_unique() -> None:
    with pytest.raises(InteractionError, match="two interactions have the same name: gsm8k, gsm8k"):
        Interactions([Gsm8kInteraction(), Gsm8kInteraction()])
