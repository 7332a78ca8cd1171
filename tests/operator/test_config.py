"""The YAML of `slackwater up`: every error names its key."""

import re
from pathlib import Path

import pytest
import yaml

from slackwater_operator.cluster.programs import Programs
from slackwater_operator.config import Config, Inference, load
from slackwater_operator.core import PermanentError

SAMPLE = Path(__file__).parents[2] / "manifests/samples/workstation.yaml"


def error_of(folder: Path, text: str) -> str:
    file = folder / "c.yaml"
    file.write_text(text)
    with pytest.raises(PermanentError) as caught:
        load(file)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{file}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("inferense: {}", "inferense: unknown key; did you mean 'inference'?", id="unknown section"),
        pytest.param(
            "inference: {min_replica: 1}",
            "inference.min_replica: unknown key; did you mean 'min_replicas'",
            id="unknown key",
        ),
        pytest.param(
            "slots: {count: 0}\ninference: {}",
            "slots.count: input should be greater than or equal to 1, got 0",
            id="no slots",
        ),
        pytest.param(
            "inference: {port: 99999}",
            "inference.port: input should be less than or equal to 65535, got 99999",
            id="port",
        ),
        pytest.param(
            "inference: {min_replicas: 5}", "inference: min_replicas (5) is above max_replicas (4)", id="bounds"
        ),
        pytest.param("inference: {host: 0.0.0.0}", "keys_file or database must be given", id="open to the world"),
        pytest.param("inference: {store: voices}", "store and database belong together", id="half a store"),
        pytest.param("cleaning: [{name: a, input: x}]", "cleaning[0].output: is required", id="missing"),
        pytest.param(
            "cleaning: [{name: a, input: x, output: y}, {name: a, input: x, output: z}]",
            "'a' is used twice",
            id="twice",
        ),
        pytest.param("slots: {count: 2}", "there is nothing to run", id="nothing to run"),
        pytest.param("policy: {tick_s: 0, panic_s: 0}\ninference: {}", "(and 1 more)", id="several"),
        pytest.param("- a\n- b", "must hold a mapping", id="a list"),
        pytest.param("a: [", "is not YAML", id="not YAML"),
    ],
)
def test_an_error_is_one_line_that_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    assert said in error_of(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"nowhere\.yaml.*No such file"):
        load(tmp_path / "nowhere.yaml")


def test_relative_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    inference = "{model: s2, store: voices, database: 'sqlite:////db', keys_file: k}"
    (tmp_path / "c.yaml").write_text(
        f"state_dir: s\ncleaning: [{{name: a, input: in, output: /abs}}]\ninference: {inference}"
    )

    config = load(tmp_path / "c.yaml")

    assert config.state_dir == tmp_path / "s"
    assert config.inference is not None
    assert config.inference.model == str(tmp_path / "s2")
    assert (config.inference.store, config.inference.database) == (str(tmp_path / "voices"), "sqlite:////db")
    assert config.inference.keys_file == tmp_path / "k"
    assert (config.cleaning[0].input, config.cleaning[0].output) == (tmp_path / "in", Path("/abs"))


def test_the_sample_shows_every_key_with_its_default() -> None:
    config = load(SAMPLE)
    shown = yaml.safe_load(SAMPLE.read_text())

    assert shown.keys() == Config.model_fields.keys()
    examples = {"slots": {"count"}, "inference": set(), "policy": set()}
    for section, own in examples.items():
        model = getattr(config, section)
        for name, info in type(model).model_fields.items():
            if name in ("keys_file", "store", "database"):
                assert re.search(rf"# {name}:", SAMPLE.read_text())
            elif name not in own:
                assert shown[section][name] == info.default, f"{section}.{name}"
    assert shown["cleaning"][0].keys() == type(config.cleaning[0]).model_fields.keys()


def test_engines_get_the_model_and_the_stores_and_stay_closed_without_keys_where_others_can_reach_them() -> None:
    alone = Programs(Inference()).engine(standby=False)
    shared = Programs(
        Inference(model="/s2", store="s3://voices", database="postgresql://db/voices", host="0.0.0.0")
    ).engine(standby=False)

    assert "--model=tiny" in alone
    assert not [option for option in alone if option.startswith(("--store", "--database", "--require-key"))]
    assert {"--model=/s2", "--store=s3://voices", "--database=postgresql://db/voices", "--require-key"} <= {*shared}
