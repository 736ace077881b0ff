"""Where a setting comes from: precedence, conversion, and errors that name their source."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.config_sources import coerce, field_types, flag_name, load_config, read_yaml, variable_name
from octavo.errors import ConfigError, OctavoError

VALUES = {
    "model": st.sampled_from(["smollm2", "some/folder", "a.gguf"]),
    "revision": st.one_of(st.none(), st.sampled_from(["main", "v1"])),
    "backend": st.sampled_from(["auto", "cpu", "reference"]),
    "threads": st.integers(0, 64),
    "kv_cache_memory": st.one_of(st.integers(1, 2**40), st.sampled_from(["2GiB", "512MiB", "1.5G"])),
    "num_kv_blocks": st.one_of(st.none(), st.integers(1, 10**6)),
    "max_num_seqs": st.integers(1, 512),
    "enable_prefix_caching": st.booleans(),
    "seed": st.one_of(st.none(), st.integers(-(2**62), 2**62)),
}


def settings():
    return st.fixed_dictionaries({}, optional=VALUES)


def as_text(value):
    """How a person writes a value in the environment or after a flag."""
    return {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


@given(file=settings(), env=settings(), flags=settings())
def test_flags_beat_environment_beats_file_beats_defaults(tmp_path_factory, file, env, flags):
    path = tmp_path_factory.getbasetemp() / "octavo.yaml"
    path.write_text(yaml.safe_dump(file))
    config = load_config(
        path,
        {variable_name(name): as_text(value) for name, value in env.items()},
        {name: as_text(value) for name, value in flags.items()},
    )
    assert config == EngineConfig(**{**file, **env, **flags})


@given(settings())
def test_the_same_setting_means_the_same_from_every_source(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "same.yaml"
    path.write_text(yaml.safe_dump(values))
    texts = {name: as_text(value) for name, value in values.items()}
    from_file = load_config(path, {}, {})
    from_environment = load_config(None, {variable_name(name): text for name, text in texts.items()}, {})
    from_flags = load_config(None, {}, texts)
    assert from_file == from_environment == from_flags == EngineConfig(**values)


def test_nothing_given_is_the_default():
    assert load_config(None, {}, {}) == load_config(None, {"OCTAVO_THREADS": "", "HOME": "/"}, {"threads": None}) == EngineConfig()


def test_every_setting_has_help_and_a_type_that_text_can_be_turned_into():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"]
        coerce(as_text(field.default), field_types(EngineConfig)[field.name])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("thread: 2", "unknown setting 'thread'; did you mean threads?"),
        ("kv-cache-memory: 1GiB", "did you mean kv_cache_memory?"),
        ("2: 3", "unknown setting 2"),
        ("zzzz: 1", "unknown setting 'zzzz'"),
        ("threads: two", "threads: must be an integer, got 'two'"),
        ("threads: 1.5", "threads: must be an integer, got 1.5"),
        ("threads: true", "threads: must be an integer, got True"),
        ("threads: null", "threads: must be an integer, got None"),
        ("threads: [1]", "threads: must be an integer, got [1]"),
        ("threads: -1", "threads: threads must be 0 or a positive integer"),
        ("enable_prefix_caching: 1", "must be true or false, got 1"),
        ("model: 7", "model: must be text, got 7; put it in quotes"),
        ("backend: cuda", "backend: must be auto, cpu, reference or torch, got 'cuda'"),
        ("kv_cache_memory: 2 furlongs", "not a memory size"),
        ("threads: 1\nthreads: 2", "octavo.yaml:2:1: 'threads' is given twice"),
        ("a: &x [1]\nb: *x", "aliases are not allowed"),
        ("model: !!python/name:os.system", "could not determine a constructor"),
        ("threads: [", "octavo.yaml:1:11"),
        ("- threads", "must hold lines like 'threads: 2', not a list"),
        ("just words", "not a str"),
        ("a: 1\n---\nb: 2", "octavo.yaml:2:1"),
        ("? [1, 2]\n: 3", "octavo.yaml"),
        ("? {a: 1}\n: 3", "octavo.yaml"),
        ("model: 2026-99-99", "octavo.yaml"),
        ("model: \x00", "octavo.yaml"),
        ("[" * 5000, "octavo.yaml"),
        ("model: \ud800", "octavo.yaml"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "octavo.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert message in str(caught.value) and "octavo.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    for path, words in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=words):
            load_config(path, {}, {})
    (tmp_path / "huge.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(tmp_path / "huge.yaml")


@pytest.mark.parametrize("content", ["", "# only a comment\n", "---\n", "threads: 3\n", "threads: '3'\n"])
def test_good_small_files(tmp_path, content):
    path = tmp_path / "octavo.yaml"
    path.write_text(content)
    assert load_config(path, {}, {}).threads == (3 if "3" in content else 0)


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        ({"OCTAVO_THREADS": "many"}, {}, "OCTAVO_THREADS: must be an integer, got 'many'"),
        ({"OCTAVO_KV_CACHE_MEMORY": "much"}, {}, "OCTAVO_KV_CACHE_MEMORY: not a memory size"),
        ({"OCTAVO_ENABLE_PREFIX_CACHING": "maybe"}, {}, "OCTAVO_ENABLE_PREFIX_CACHING: must be true or false"),
        ({"OCTAVO_THREAD": "2"}, {}, "OCTAVO_THREAD: unknown setting; did you mean OCTAVO_THREADS?"),
        ({}, {"max_num_seqs": "0"}, "--max-num-seqs: max_num_seqs must be a positive integer"),
        ({}, {"max_num_seq": "1"}, "--max-num-seq: unknown setting; did you mean max_num_seqs?"),
    ],
)
def test_errors_name_the_variable_or_the_flag(env, flags, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, env, flags)
    assert message in str(caught.value)


def test_other_octavo_variables_are_left_alone():
    assert load_config(None, {"OCTAVO_ALLOW_REFERENCE": "1", "OCTAVO_DEBUG": "1", "OCTAVO_CONFIG": "x"}, {}) == EngineConfig()


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.integers()))
def test_any_value_is_taken_or_refused_in_one_line(value):
    for name in field_types(EngineConfig):
        try:
            config = load_config(None, {}, {name: value})
        except OctavoError as error:
            assert str(error).startswith(flag_name(name)) and "\n" not in str(error)
        else:
            assert isinstance(config, EngineConfig)


def test_coerce_reads_lists_and_maps():
    from octavo.sampling_params import SamplingParams

    types = field_types(SamplingParams)
    assert coerce("1, 2,3", types["stop_token_ids"]) == [1, 2, 3]
    assert coerce("5=-1.5,7=2", types["logit_bias"]) == {5: -1.5, 7: 2.0}
    assert coerce("none", types["temperature"]) is None
    assert coerce("raw", Literal["raw", "processed"]) == "raw"
    with pytest.raises(ValueError, match="list of ID=VALUE"):
        coerce("5", types["logit_bias"])


def test_paths_may_be_strings_or_paths(tmp_path: Path):
    (tmp_path / "o.yaml").write_text("threads: 1")
    assert load_config(tmp_path / "o.yaml", {}, {}).threads == 1
