"""Settings written as a file load to the same settings."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvasir_node.base.settings import SECTIONS, Settings, load_settings, setting_keys
from kvasir_node.surfaces.config_text import settings_document, settings_text, template_text

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
items = texts.filter(lambda text: text == text.strip() and "," not in text and text != "")
accepted = st.fixed_dictionaries(
    {},
    optional={
        "node.name": texts,
        "node.data_dir": texts,
        "network.join": st.lists(items, max_size=3),
        "node.roles": st.lists(st.sampled_from(["coordinator", "hub", "worker"]), min_size=1),
        "node.profile": st.sampled_from(["local", "lan", "wan"]),
        "fanout.enabled": st.booleans(),
        "coordinator.slots": st.integers(1, 4096),
        "worker.memory_bytes": st.integers(1, 10**14),
        "market.poll_interval_s": st.floats(1e-6, 1e9),
        "api.key": texts,
    },
)


def values(settings: Settings) -> list[object]:
    return [getattr(settings, section) for section in SECTIONS]


@examples(max_examples=100, deadline=None, derandomize=True)
@given(accepted)
def test_what_is_written_loads_to_the_same(tmp_path_factory, given_values):
    key = given_values.pop("api.key", None)
    env = {"KVASIR_API__KEY": key} if key is not None else {}
    settings = load_settings(flags=given_values, env=env)
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_text(settings_text(settings), encoding="utf-8")
    assert values(load_settings(file=path, env=env)) == values(settings)


def test_the_template_changes_nothing_and_names_every_key(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(template_text(), encoding="utf-8")
    assert values(load_settings(file=path)) == values(Settings())
    uncommented = tomllib.loads(template_text().replace("\n# ", "\n"))
    named = {f"{section}.{name}" for section in SECTIONS for name in uncommented[section]}
    assert named == set(setting_keys())


def test_the_template_says_what_each_key_means():
    lines = [line for line in template_text().splitlines() if " = " in line and not line.startswith("version")]
    assert len(lines) == len(setting_keys())
    assert [line for line in lines if "  # " not in line] == []
    assert "# slots = 4  # requests computed at once" in lines


def test_secrets_are_not_shown():
    settings = load_settings(env={"KVASIR_API__KEY": "s3cret"})
    assert "s3cret" not in settings_text(settings)
    assert "# key is set (env)" in settings_text(settings)
    assert settings_document(settings)["api.key"] == {"value": True, "origin": "env"}
