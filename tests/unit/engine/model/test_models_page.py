"""docs/models.md: its table matches the families, and its example of a new family works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.registry import FAMILIES, read_model
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.reference import reference_logprobs
from support.scripts import load_script
from support.tiny import make_checkpoint

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def example(name: str) -> str:
    """Return a block of code of the page."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```\n", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_table_is_current_and_every_family_is_tested() -> None:
    make_docs = load_script(ROOT / "tools" / "make_docs.py")
    assert make_docs.update_page(PAGE, make_docs.PAGES[make_docs.MODELS_PAGE]) == PAGE, "run `make docs`"
    assert "not tested" not in PAGE
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and ".py](" in line]
    assert len(rows) == len(FAMILIES)
    assert all((ROOT / "docs" / link).is_file() for link in re.findall(r"\]\(([^)]+)\)", PAGE))
    (falcon,) = [row for row in rows if row.startswith("| FalconForCausalLM")]
    assert "(parallel two norms)" in falcon and "`alibi`" in falcon and "norm: layer" in falcon


@pytest.fixture
def acorn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, object]], Path]:
    """Register the example. Returns a function that writes a Llama as an Acorn, with additional keys in config.json."""
    (tmp_path / "acorn.py").write_text(example("family"))
    line = eval(f"{{{example('registry')}}}", {"acorn": load_script(tmp_path / "acorn.py")})
    for architecture, read in line.items():
        monkeypatch.setitem(FAMILIES, architecture, read)

    def write(more: dict[str, object]) -> Path:
        make_checkpoint(tmp_path / "llama", "llama")
        tensors = load_file(tmp_path / "llama" / "model.safetensors")
        config = json.loads((tmp_path / "llama" / "config.json").read_text())
        named = {"intermediate_size": "ffn_size", "rms_norm_eps": "norm_epsilon"}
        config = {named.get(key, key): value for key, value in config.items() if key not in ("mlp_bias", "hidden_act")}
        del config["attention_bias"]
        (tmp_path / "acorn").mkdir(exist_ok=True)
        (tmp_path / "acorn" / "config.json").write_text(
            json.dumps({**config, "architectures": ["AcornForCausalLM"], "leaf_dropout": 0.1, **more})
        )
        save_file(as_acorn(tensors, config), tmp_path / "acorn" / "model.safetensors")
        return tmp_path / "acorn"

    return write


def as_acorn(llama: dict[str, Tensor], config: dict[str, int]) -> dict[str, Tensor]:
    """Return Llama's tensors under Acorn's names."""
    names = {
        "model.layers": "acorn.blocks",
        "self_attn.o_proj": "attn.out",
        "mlp.down_proj": "ffn.down",
        "model.embed_tokens": "acorn.tokens",
        "model.norm": "acorn.norm",
        "lm_head": "head",
    }
    found = {}
    for name, tensor in llama.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if not re.search(r"[qkv]_proj|gate_proj|up_proj", name):
            found[name] = tensor
    groups = config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        inside = f"model.layers.{layer}"
        qkv = [llama[f"{inside}.self_attn.{part}_proj.weight"] for part in "qkv"]
        joint = torch.cat([part.view(groups, -1, part.shape[1]) for part in qkv], 1).flatten(0, 1)
        found[f"acorn.blocks.{layer}.attn.qkv.weight"] = joint
        gate_up = [llama[f"{inside}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        found[f"acorn.blocks.{layer}.ffn.gate_up.weight"] = torch.cat(gate_up)
    return found


def test_the_example_is_short() -> None:
    assert len((example("family") + example("registry")).splitlines()) < 60


def test_the_example_computes_what_transformers_does(acorn: Callable[[dict[str, object]], Path]) -> None:
    directory = acorn({})
    spec, decoder = load(directory)
    (ours,) = Harness(spec, decoder, torch.float32).logprobs([PROMPT])
    theirs = reference_logprobs(directory.parent / "llama", PROMPT)
    assert (ours - theirs).abs().max() < 2e-4
    requests = [greedy(1, PROMPT, 6)]
    one = generate(make_engine(directory), requests)[1].token_ids
    assert one[0] == int(theirs[-1].argmax())
    assert generate(make_engine(directory, tensor=3), requests)[1].token_ids == one


def test_the_example_reads_its_own_keys(acorn: Callable[[dict[str, object]], Path]) -> None:
    config = json.loads((acorn({"score_scale": 0.5, "logits_scale": 0.25}) / "config.json").read_text())
    spec, _ = read_model(config)
    assert (spec.layers[0].attention.scale, spec.logits_multiplier) == (0.5, 0.25)
    for change, message in (({"parallel_blocks": True}, "parallel_blocks is not"), ({"leaf": 1}, "unknown keys.*leaf")):
        with pytest.raises(ModelError, match=message):
            read_model(config | change)
