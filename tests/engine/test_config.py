"""Configuration: what is read is what was written, and everything else is refused by name."""

import logging
import math
import os
from pathlib import Path

import msgspec
import pytest
import yaml

from unlost.engine.config import (
    Config,
    ConfigError,
    build_config,
    dump_config,
    get_key,
    iter_keys,
    load_config,
    semantic_differences,
    semantic_fingerprint,
    semantic_settings,
)
from unlost.engine.config_checks import required_buffer
from unlost.engine.config_keys import FIXED, FREE, SAMPLER_KNOBS

MINIMAL = {"model": {"path": "m"}, "data": {"train": "p.jsonl"}, "reward": {"function": "reward:score"}}


def build(*overrides, **sections):
    return build_config({**MINIMAL, **sections}, overrides)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def complaint(*overrides, **sections) -> str:
    with pytest.raises(ConfigError) as raised:
        build(*overrides, **sections)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_defaults_are_those_that_users_know():
    """A minimal configuration has the defaults of the system that users come from."""
    config = build()

    assert (config.async_rl.max_inflight_prompts, config.async_rl.max_buffered_rollouts) == (32, 64)
    assert config.async_rl.sampler.name == "in_order"
    assert config.rollout_failure.max_infra_attempts_per_prompt == 5
    assert config.rollout_failure.max_data_attempts_per_prompt == 2
    assert config.checkpointing.keep_latest_k == 2


def test_file_overrides_and_paths(tmp_path, monkeypatch):
    """Paths in the file start from its folder, those in an override from the current one; overrides win."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text = "model: {path: ../m}\ndata: {train: p.jsonl}\nreward: {function: 'r:f'}\ngrpo: {max_steps: 3}\n"
    path = write(tmp_path / "a", text)
    monkeypatch.chdir(tmp_path / "b")

    config = load_config(path, ["data.train=own.jsonl", "grpo.max_steps=7"])

    assert config.model.path == str(tmp_path / "m")
    assert config.data.train == str(tmp_path / "b" / "own.jsonl")
    assert config.grpo.max_steps == 7
    assert config.reward.path == str(tmp_path / "a")
    assert config.run_dir == str(tmp_path / "a" / "runs" / "mine")
    assert config.checkpoint_dir == str(tmp_path / "a" / "runs" / "mine" / "checkpoints")


def test_a_file_called_config_is_named_after_its_folder(tmp_path):
    """``quickstart/config.yaml`` makes the run ``quickstart``, not ``config``."""
    folder = tmp_path / "quickstart"
    folder.mkdir()
    path = write(folder, yaml.safe_dump(MINIMAL), "config.yaml")

    assert load_config(path).run.name == "quickstart"


def test_resolved_configuration_reads_back_equal(tmp_path):
    """What is written into the run folder is the same configuration, wherever it is read from."""
    config = build("async_rl.sampler.warmup_lookahead_versions=1", "stop.deadline_s=3600")
    path = write(tmp_path, dump_config(config), "config.yaml")

    assert load_config(path) == config


def test_yaml_numbers_as_people_write_them(tmp_path):
    """``1e-4`` is a number, which plain PyYAML takes for a text."""
    assert build("grpo.learning_rate=1e-4").grpo.learning_rate == 1e-4
    assert build("grpo.learning_rate=1E+2").grpo.learning_rate == 100.0
    assert build("grpo.learning_rate=2").grpo.learning_rate == 2.0


def test_keys_that_are_no_python_names():
    """``class`` is spelled as users write it, in the file, in overrides, in the dump and in look-ups."""
    config = build("async_rl.sampler.name=custom", "async_rl.sampler.class=mine:Sampler")

    assert config.async_rl.sampler.class_ == "mine:Sampler"
    assert get_key(config, "async_rl.sampler.class") == "mine:Sampler"
    assert yaml.safe_load(dump_config(config))["async_rl"]["sampler"]["class"] == "mine:Sampler"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("grpo.max_step=3", "grpo.max_steps"),
        ("grpo.temperature=1", "generation.temperature"),
        ("async_rl.sampler.nam=x", "async_rl.sampler.name"),
        ("checkpoint.save_period=1", "checkpointing.save_period"),
        ("grop=1", "grpo"),
    ],
)
def test_unknown_override_names_the_nearest_key(override, nearest):
    """A slip of the pen is answered with the key that was meant."""
    message = complaint(override)

    assert override.partition("=")[0] in message
    assert f"did you mean {nearest!r}?" in message
    assert f"-o {override}" in message


def test_unknown_key_in_file_names_file_and_place(tmp_path):
    """In a file too, with the whole path of the key."""
    path = write(tmp_path, "async_rl:\n  sampler: {max_lookahed_versions: 2}\n")

    with pytest.raises(ConfigError) as raised:
        load_config(path)

    assert str(raised.value) == (
        f"{path}: unknown key 'async_rl.sampler.max_lookahed_versions'; "
        "did you mean 'async_rl.sampler.max_lookahead_versions'?"
    )


@pytest.mark.parametrize(
    ("override", "expected", "value"),
    [
        ("grpo.max_steps=ten", "whole number ≥ 1", "ten"),
        ("grpo.max_steps=0", "whole number ≥ 1", "0"),
        ("grpo.max_steps=1.5", "whole number ≥ 1", "1.5"),
        ("grpo.max_steps=true", "whole number ≥ 1", "true"),
        ("generation.top_p=1.1", "number > 0 and ≤ 1", "1.1"),
        ("data.shuffle=1", "true or false", "1"),
        ("model.dtype=[a, b]", "one of float32, bfloat16, float16, auto", "[a, b]"),
        ("checkpointing.keep_latest_k=1", "whole number ≥ 2", "1"),
        ("rollout_checkpointing.interval_s=0", "number > 0, or null", "0"),
        ("grpo.learning_rate=.inf", "a finite number", ".inf"),
        ("grpo.learning_rate=.nan", "a finite number", ".nan"),
        ("model.path=''", "text (not empty)", "''"),
    ],
)
def test_wrong_value_names_place_value_and_what_was_expected(override, expected, value):
    """Never a bare type error."""
    key = override.partition("=")[0]

    assert complaint(override) == f"-o {override}: {key}: expected {expected}, got {value}"


@pytest.mark.parametrize("missing", ["model.path", "data.train", "reward.function"])
def test_missing_required_key(missing):
    """What has no default must be given, and the message says what it is."""
    section = missing.partition(".")[0]

    assert f"{missing} is missing: " in complaint(**{section: {}})


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("grpo.max_steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("grpo=3", "'grpo' is a section; set one of its keys, e.g. grpo.num_prompts_per_step=…"),
        ("grpo.max_steps={", "not valid YAML"),
    ],
)
def test_malformed_override(override, text):
    """An override that is none says what one looks like."""
    assert text in complaint(override)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("grpo: [1, 2]", "grpo: expected keys and values, got [1, 2]"),
        ("just text", "expected keys and values, got just text"),
        ("grpo: {max_steps: 1}\ngrpo: {max_steps: 2}\n", "mine.yaml:2: not valid YAML: key 'grpo' is given twice"),
        ("grpo:\n  max_steps: 1\n  max_steps: 2\n", "mine.yaml:3: not valid YAML: key 'max_steps' is given twice"),
        ("grpo: {max_steps: 1", "mine.yaml:1: not valid YAML"),
        ("x: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_malformed_file(tmp_path, text, part):
    """The line is named where YAML gives one; a key given twice is not a silent loss."""
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text))

    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unreadable_file(tmp_path):
    """Absent, a folder, or no text: said in one line."""
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, part in ((tmp_path / "no.yaml", "No such file"), (tmp_path, "is a folder"), (binary, "not UTF-8")):
        with pytest.raises(ConfigError, match=part):
            load_config(path)


def test_empty_sections_are_allowed():
    """A section whose keys are all commented out has its defaults."""
    assert build(grpo=None).grpo.max_steps == 100


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["async_rl.max_buffered_rollouts=63"], "63 is too small: sampler in_order"),
        (["async_rl.sampler.warmup_lookahead_versions=2"], "needs 96"),
        (["async_rl.sampler.name=weight_fifo", "async_rl.sampler.max_staleness_versions=2"], "needs 96"),
        (["async_rl.sampler.name=ready_first", "async_rl.sampler.max_staleness_versions=2"], "needs 96"),
        (["async_rl.sampler.name=windowed", "async_rl.max_buffered_rollouts=31"], "below the 32 groups"),
        (["async_rl.min_groups_for_streaming_train=33"], "is more than grpo.num_prompts_per_step 32"),
        (["async_rl.sampler.name=custom"], "async_rl.sampler.class: sampler custom needs it"),
        (["async_rl.sampler.class=a:B"], "only for async_rl.sampler.name custom"),
        (["async_rl.sampler.name=custom", "async_rl.sampler.class=a.b"], "expected module:name, got 'a.b'"),
        (["reward.function=reward.score"], "expected module:name, got 'reward.score'"),
        (["reward.function='reward:'"], "expected module:name"),
        (["async_rl.sampler.warmup_lookahead_versions=0"], "is below max_lookahead_versions 1"),
        (
            ["rollout_failure.on_dropped_prompt=replace", "rollout_failure.max_replacement_attempts=0"],
            "max_replacement_attempts: on_dropped_prompt replace needs at least 1",
        ),
        (
            ["rollout_failure.on_dropped_prompt=replace", "rollout_failure.replacement_reserve_prompts=0"],
            "replacement_reserve_prompts: on_dropped_prompt replace needs at least 1",
        ),
        (["rollout_failure.max_backoff_s=0.5"], "is below backoff_base_s"),
        (["data_plane.enabled=false"], "data_plane.enabled: must be true"),
        (["data_plane.backend=mooncake", "data_plane.payloads=none"], "data_plane.payloads must be full"),
        (["data_plane.backend=mooncake"], "set checkpointing.save_data_plane to false"),
        (["data_plane.payloads=none", "checkpointing.enabled=false"], "keeps rows in data plane snapshots alone"),
        (["data_plane.payloads=none", "checkpointing.save_data_plane=false"], "keeps rows in data plane snapshots"),
        (["rollout_checkpointing.interval_s=9", "checkpointing.enabled=false"], "needs checkpointing.enabled"),
        (["rollout_checkpointing.interval_s=9", "checkpointing.save_data_plane=false"], "save_data_plane"),
        (["journal.backlog_max_bytes=5"], "journal.backlog_high_bytes"),
        (["model.device=cuda", "trainer.gpus=1"], "workers.gpus: model.device cuda needs more than 0"),
        (["model.device=cuda", "workers.gpus=1"], "trainer.gpus: model.device cuda needs more than 0"),
        (["stop.signal=SIGFOO"], "'SIGFOO' is no signal here"),
        (["stop.signal=SIG_IGN"], "'SIG_IGN' is no signal here"),
        (["stop.signal=SIGKILL"], "SIGKILL cannot be caught"),
        (["stop.deadline_s=60"], "leaves nothing before stop.grace_s"),
    ],
)
def test_what_cannot_work_is_refused_at_set_up(overrides, part):
    """Each combination, in one line that names the key."""
    assert part in complaint(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["async_rl.sampler.max_lookahead_versions=0", "async_rl.max_buffered_rollouts=32"],
        ["async_rl.sampler.name=windowed", "async_rl.max_buffered_rollouts=32"],
        ["async_rl.sampler.name=ready_first", "async_rl.sampler.max_staleness_versions=0"],
        ["async_rl.min_groups_for_streaming_train=32"],
        ["data_plane.backend=mooncake", "checkpointing.save_data_plane=false"],
        ["data_plane.payloads=none"],
        ["model.device=cuda", "workers.gpus=0.5", "trainer.gpus=0.5"],
        ["stop.signal=null", "stop.deadline_s=61"],
        ["rollout_failure.on_dropped_prompt=replace"],
    ],
)
def test_what_just_works_is_accepted(overrides):
    """The same limits from the other side."""
    assert isinstance(build(*overrides), Config)


@pytest.mark.parametrize(
    ("sampler", "ahead", "needed"),
    [("in_order", 0, 8), ("in_order", 3, 32), ("weight_fifo", 2, 24), ("ready_first", 0, 8), ("windowed", 5, 0)],
)
def test_required_buffer(sampler, ahead, needed):
    """P·(lookahead + 1) for gated samplers, computed here by hand; none for an ungated one."""
    knob = SAMPLER_KNOBS[sampler][0]
    config = build(
        f"async_rl.sampler.name={sampler}", f"async_rl.sampler.{knob}={ahead}", "grpo.num_prompts_per_step=8"
    )

    assert required_buffer(config) == needed


def test_odd_settings_are_only_logged(caplog):
    """A key that the chosen sampler does not read is said, not refused."""
    with caplog.at_level(logging.WARNING):
        build("async_rl.sampler.name=windowed", "async_rl.sampler.max_lookahead_versions=3")
        build("rollout_failure.on_dropped_prompt=replace", "async_rl.sampler.name=ready_first")

    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "configuration: async_rl.sampler.max_lookahead_versions has no meaning for sampler windowed",
        "configuration: rollout_failure.on_dropped_prompt replace acts only on stamped steps; ready_first has none",
    ]


def test_streaming_minimum_defaults_to_the_whole_step():
    """Without a setting a step starts when all of its groups are ready."""
    assert build("grpo.num_prompts_per_step=8").streaming_groups_min == 8
    assert build("async_rl.min_groups_for_streaming_train=3").streaming_groups_min == 3


def test_journal_section_reaches_the_writer():
    """Every key that the writer knows arrives there."""
    options = build("journal.flush_interval_ms=7", "journal.max_write_failures=9").journal.options()

    assert (options.flush_interval_ms, options.max_write_failures) == (7.0, 9)


# --- resume --------------------------------------------------------------------------------------------------------

FIXED_EXAMPLES = {
    "run.seed": 1,
    "grpo.num_generations_per_prompt": 4,
    "generation.temperature": 0.5,
    "async_rl.sampler.name": "windowed",
    "data_plane.payloads": "none",
}
FREE_EXAMPLES = {
    "grpo.learning_rate": 0.5,
    "grpo.max_steps": 7,
    "workers.count": 3,
    "async_rl.max_buffered_rollouts": 640,
    "run.dir": "elsewhere",
    "model.path": "elsewhere",
    "stop.deadline_s": 1e4,
}


@pytest.mark.parametrize(("key", "value"), FIXED_EXAMPLES.items())
def test_fixed_keys_change_the_fingerprint_and_are_named_with_both_values(key, value):
    """What would give journaled work another meaning is found, and both values are said."""
    before = build()
    after = build(f"{key}={value}")

    differences = semantic_differences(semantic_settings(before), after)

    assert semantic_fingerprint(before) != semantic_fingerprint(after)
    assert [(d.key, d.recorded, d.configured) for d in differences] == [(key, get_key(before, key), value)]
    assert str(differences[0]) == f"{key}: the run has {get_key(before, key)}, the configuration {value}"


@pytest.mark.parametrize(("key", "value"), FREE_EXAMPLES.items())
def test_free_keys_do_not(key, value):
    """What may change on resume leaves the fingerprint alone."""
    before = build()
    after = build(f"{key}={value}")

    assert get_key(before, key) != get_key(after, key)
    assert semantic_fingerprint(before) == semantic_fingerprint(after)
    assert semantic_differences(semantic_settings(before), after) == []


def test_settings_survive_the_journal():
    """They are recorded as msgpack and compared after a round trip."""
    config = build()
    recorded = msgspec.msgpack.decode(msgspec.msgpack.encode(semantic_settings(config)))

    assert semantic_differences(recorded, config) == []


def test_a_key_that_an_older_version_did_not_record_counts_with_its_default():
    """An upgrade alone does not refuse a run; a changed value of the new key does."""
    recorded = semantic_settings(build())
    del recorded["generation.top_p"]

    assert semantic_differences(recorded, build()) == []
    assert [d.key for d in semantic_differences(recorded, build("generation.top_p=0.5"))] == ["generation.top_p"]


def test_every_key_is_documented_and_has_a_valid_default():
    """Each has a line of documentation, a resume rule, and a default that its own type accepts."""
    infos = list(iter_keys())

    assert len({info.path for info in infos}) == len(infos) > 80
    for info in infos:
        assert len(info.doc) > 5, info.path
        assert info.resume in (FIXED, FREE), info.path
        assert info.expected, info.path
        if not info.required:
            msgspec.convert(info.default, info.type)
            assert not isinstance(info.default, float) or math.isfinite(info.default)


def test_units_are_in_names_or_documented():
    """A duration or size without a unit in its name is a trap."""
    for info in iter_keys():
        leaf = info.path.rpartition(".")[2].removesuffix("_max")
        if info.unit == "seconds":
            assert leaf.endswith("_s"), info.path
        if info.unit == "milliseconds":
            assert leaf.endswith("_ms"), info.path
        if leaf.endswith(("_s", "_ms", "_bytes")):
            assert info.unit, info.path


def test_configuration_is_immutable():
    """Nothing can change it behind the fingerprint's back."""
    config = build()
    with pytest.raises(AttributeError):
        config.grpo.max_steps = 5


def test_home_folder_is_expanded():
    """``~`` in a path means what it does in a shell."""
    assert build("model.path=~/m").model.path == os.path.expanduser("~/m")
