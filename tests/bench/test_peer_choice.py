"""Which engines are compared and what they load: flags, the exported weights against transformers, and the command itself."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.bench import peer_choice
from octavo.bench.peer_choice import chosen, export, model_path, ours
from octavo.bench.peer_process import PEERS
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelLoadError
from tests.tiny_models import hf_model, write_tiny

FAKE = Path(__file__).with_name("fake_peer.py")
GGUF = Path("/models/m.gguf")


# -- flags ---------------------------------------------------------------------------------------------------------
def never():
    raise AssertionError("nothing had to be exported")


def test_each_engine_gets_what_it_reads(tmp_path):
    asked = []

    def exported():
        asked.append(1)
        return tmp_path

    peers = [f"{name}={sys.executable}" for name in ("llamacpp", "vllm", "openvino", "transformers", "octavo", str(FAKE))]
    found = {peer.name: peer for peer in chosen(peers, [], [], GGUF, exported)}
    assert list(found) == ["llamacpp", "vllm", "openvino", "transformers", "octavo, other build", "fake_peer"]
    assert found["vllm"].model == found["transformers"].model == str(tmp_path) and len(asked) == 2
    assert {found[name].model for name in ("llamacpp", "openvino", "octavo, other build", "fake_peer")} == {str(GGUF)}
    assert found["vllm"].script == PEERS / "vllm_peer.py" and found["fake_peer"].script == FAKE
    for peer in found.values():
        assert peer.script.is_file() and peer.python == sys.executable and not peer.options


def test_models_and_options_by_name(tmp_path):
    flags = ["llamacpp.n_ubatch=256", "llamacpp.flash_attn=true", "fake_peer.text=a=b", "fake_peer.version=1.2.3", "fake_peer.x={}"]
    peers = [f"llamacpp={sys.executable}", f"{FAKE}={sys.executable}"]
    first, second = chosen(peers, [f"fake_peer={tmp_path}"], flags, GGUF, never)
    assert first.options == {"n_ubatch": 256, "flash_attn": True} and first.model == str(GGUF)
    assert second.options == {"text": "a=b", "version": "1.2.3", "x": "{}"} and second.model == str(tmp_path)


@pytest.mark.parametrize(
    ("peers", "models", "options", "words"),
    [
        (["llamacpp"], [], [], "NAME=VALUE"),
        (["=x"], [], [], "NAME=VALUE"),
        (["ollama=x"], [], [], "there are llamacpp"),
        (["no/such_file.py=x"], [], [], "no file"),
        (["vllm=x", "vllm=y"], [], [], "given twice"),
        (["vllm=x"], ["openvino=y"], [], "no --peer openvino"),
        (["vllm=x"], ["vllm=/nonexistent"], [], "does not exist"),
        (["vllm=x"], [], ["dtype=float32"], "NAME.KEY"),
        (["vllm=x"], [], ["llamacpp.dtype=float32"], "no --peer llamacpp"),
    ],
)
def test_flags_that_mean_nothing(peers, models, options, words):
    with pytest.raises(ConfigError, match=words):
        chosen(peers, models, options, GGUF, never)


def test_a_folder_is_no_gguf_file(tmp_path):
    with pytest.raises(ConfigError, match="--peer-model llamacpp=FILE.gguf"):
        chosen(["llamacpp=x"], [], [], tmp_path, never)
    assert chosen(["vllm=x"], [], [], tmp_path, never)[0].model == str(tmp_path)


def test_our_engine_gets_the_settings_that_were_given():
    peer = ours(EngineConfig(model="m", kv_cache_memory="1GiB", block_size=32, threads=3), GGUF)
    assert peer.options == {"kv_cache_memory": 2**30, "block_size": 32} and peer.model == str(GGUF) and peer.python == sys.executable


# -- exported weights ----------------------------------------------------------------------------------------------
def loaded(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model, problems = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    assert not any(problems[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"quant": "Q4_1", "tie_word_embeddings": True}),
        ("llama", {"quant": "Q8_0", "num_key_value_heads": 4}),
        ("qwen2", {"quant": "Q4_0"}),
        ("qwen2", {"quant": "BF16", "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
)
def test_exported_weights_are_those_of_the_file_in_bfloat16(tmp_path, family, settings):
    import torch

    tiny = write_tiny(tmp_path / "m", family=family, fmt="gguf", seed=3, **settings)
    folder = export(str(tiny.path), tmp_path / "out")
    model, oracle = loaded(folder), hf_model(tiny)
    expected = oracle.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, values in model.state_dict().items():
        assert torch.equal(values, expected[name].bfloat16().float()), name
    # the same settings too: with the same weights the two compute the same
    oracle.load_state_dict({name: values.bfloat16().float() for name, values in expected.items()})
    tokens = torch.tensor([np.random.default_rng(0).integers(0, 256, 40).tolist()])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, oracle(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(ModelLoadError, match="has files in it"):
        export(str(tiny.path), folder)


def test_exported_weights_load_here_too(tmp_path):
    from octavo import LLM, SamplingParams

    tiny = write_tiny(tmp_path / "m", family="llama", fmt="gguf", seed=3, quant="Q8_0")
    folder = export(str(tiny.path), tmp_path / "out")
    other = write_tiny(tmp_path / "tokenizer", family="llama", fmt="safetensors", seed=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((other.path / name).read_bytes())
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    one, two = (LLM(str(path), backend="reference").generate([5, 6, 7, 8], params)[0].outputs[0] for path in (tiny.path, folder))
    assert one.token_ids == two.token_ids and one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=0.02)


def test_what_config_json_cannot_say_is_refused(tmp_path):
    safetensors = write_tiny(tmp_path / "s", family="llama", fmt="safetensors")
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        export(str(safetensors.path), tmp_path / "out")
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    tiny = write_tiny(tmp_path / "l", family="llama", fmt="gguf", rope_parameters=rope)
    with pytest.raises(ModelLoadError, match="rotary embeddings"):
        export(str(tiny.path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room(tmp_path, monkeypatch):
    import collections
    import shutil

    tiny = write_tiny(tmp_path / "m", family="llama", fmt="gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: collections.namedtuple("usage", "free")(1000))
    with pytest.raises(ModelLoadError, match="no room"):
        export(str(tiny.path), tmp_path / "out")


# -- the command ---------------------------------------------------------------------------------------------------
@pytest.fixture
def call(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["octavo", *arguments])
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def test_ours_beside_a_scripted_engine_and_one_that_is_not_there(call, tmp_path, smollm2_path):
    output = tmp_path / "c.json"
    code, out, err = call(
        "bench", "compare", "smollm2", "--peer", f"{FAKE}={sys.executable}", "--peer", "vllm=/nonexistent/python", "--peer-model",
        f"vllm={tmp_path}", "--peer-option", "fake_peer.gap=1", "--work", "decode:12:5:2,prefill:20:1", "--rounds", "1", "--threads", "1",
        "--json", "--output", str(output),
    )  # fmt: skip
    figures = json.loads(out)
    assert code == 1 and not err and figures["model"] == smollm2_path.name and figures["threads"] == 1
    assert "outside the" in figures["engines"]["fake_peer"]["error"]  # it says 4 s and took none
    assert figures["engines"]["vllm"]["error"] == "/nonexistent/python does not start: No such file or directory"
    ours = figures["engines"]["octavo"]
    assert ours["error"] is None and ours["load_s"] and 100 < ours["memory_mib"]["peak"] < 2000
    assert all(values["tokens_per_s"]["octavo"]["median"] > 0 for values in figures["work"].values())
    saved = json.loads(output.read_text())
    assert saved["benchmark"] == "compare" and saved["results"] == figures and {"cpu", "cores", "load_average"} <= saved["machine"].keys()
    assert sys.executable not in saved["command"] and "--peer vllm=.../" in saved["command"]


def test_a_table_and_exit_code_0(call):
    code, out, err = call("bench", "compare", "--peer", f"{FAKE}={sys.executable}", "--work", "prefill:20:1", "--rounds", "1")
    assert code == 0 and not err and "| prefill, B=1, P=20 | " in out and "(fake_peer)" in out and "| load, s | " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--work", "decode:1"), "--work"),
        (("--rounds", "0"), "--rounds must be"),
        (("--timeout", "x"), "--timeout must be"),
        (("--peer", "x=y"), "'x' is unknown"),
        (("/nonexistent/m.gguf",), "/nonexistent/m.gguf"),
    ],
)
def test_bad_usage_is_one_line(call, arguments, words):
    code, out, err = call("bench", "compare", *arguments)
    assert code in (1, 2) and not out and words in err and err.count("\n") == 1


def test_export_model_as_a_command(call, tmp_path):
    tiny = write_tiny(tmp_path / "m", family="qwen2", fmt="gguf")
    code, out, err = call("bench", "export-model", str(tiny.path), str(tmp_path / "out"))
    assert (
        code == 0 and not out and "wrote" in err and {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    )
    code, out, err = call("bench", "export-model", str(tiny.path), str(tmp_path / "out"))
    assert code != 0 and err.count("\n") == 1 and "has files in it" in err


def test_a_model_named_by_its_folder_or_file(smollm2_path, tmp_path):
    assert model_path("smollm2") == model_path(str(smollm2_path)) == smollm2_path.absolute()
    folder = write_tiny(tmp_path / "s", family="llama", fmt="safetensors").path
    assert model_path(str(folder)) == folder.absolute()
    assert set(peer_choice.KNOWN) == {"llamacpp", "openvino", "transformers", "vllm", "octavo"}
