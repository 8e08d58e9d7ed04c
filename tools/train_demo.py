"""Train the bundled demo model on the Python standard library and write it to serve_llm/demo/.

    python tools/train_demo.py              train, save, evaluate, write the model card
    python tools/train_demo.py --second     only the second stage, from the weights of an earlier first stage
    python tools/train_demo.py --evaluate   only evaluate serve_llm/demo/ and rewrite the card

The result depends only on the seed and the step counts, never on the clock. Needs torch, transformers and tokenizers;
with a C++ compiler it is about a third faster (torch.compile). The server does not import this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import demo_data
import demo_snippets
import numpy
import torch
from demo_muon import Muon
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

# Output of the first stage; OUTPUT changes only when training is complete.
INTERIM = Path(tempfile.gettempdir()) / "serve_llm_demo_interim"
OUTPUT = Path(__file__).resolve().parent.parent / "serve_llm" / "demo"
RECORD = "training.json"
NUM_THREADS = 2
SEED = 1234
VOCABULARY_SIZE = 4096
CHAT_STRIDE = 4
MAXIMUM_CONTEXT = 2048

WARMUP_STEPS = 40
MUON_RATE = 0.02
ADAM_RATE = 3e-3
MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0
# In the first stage the learning rate is constant, then falls linearly to a twentieth over this last share of the
# steps.
DECAY_SHARE = 0.6

# The second stage starts at SECOND_SHARE of the first stage's learning rate, decays to 0, and mixes three kinds of
# rows.
SECOND_STEPS = 200
SECOND_SHARE = 0.25
SECOND_TOKENS = 512
SNIPPET_ROWS, CHAT_ROWS, FILE_ROWS = 4, 2, 2


@dataclass(frozen=True)
class Phase:
    """A part of the first stage with one row length; each step processes num_rows * num_tokens tokens."""

    num_steps: int
    num_rows: int
    num_tokens: int


PHASES = (Phase(1300, 8, 512), Phase(400, 2, 2048))
FIRST_STEPS = sum(phase.num_steps for phase in PHASES)


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    end_of_text = tokenizer.token_to_id(demo_data.END_OF_TEXT)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        num_hidden_layers=6,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAXIMUM_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, tokenizer.token_to_id(demo_data.END_OF_TURN)],
        pad_token_id=tokenizer.token_to_id(demo_data.PADDING),
    )
    return Qwen3ForCausalLM(config)


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of rows of ids; a single module, so that torch.compile sees the whole step."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:  # (rows, tokens + 1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def build_optimisers(model: Qwen3ForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muon = Muon(matrices, MUON_RATE, MOMENTUM, WEIGHT_DECAY)
    return muon, torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def first_share(step: int) -> float:
    """Return the share of the full learning rate at a step: warm up, stay constant, fall linearly to 0.05."""
    left = (FIRST_STEPS - step) / (FIRST_STEPS * DECAY_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS, 0.05 + 0.95 * left)


def second_share(step: int) -> float:
    return SECOND_SHARE * min((step + 1) / 10, 1 - step / SECOND_STEPS)


def train(model: Qwen3ForCausalLM, batches: Iterator[numpy.ndarray], rate_schedule: Callable[[int], float]) -> None:
    """Take one optimiser step per batch."""
    optimisers = build_optimisers(model)
    base_rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    compute_loss = NextTokenLoss(model)
    if shutil.which("g++"):
        compute_loss.compile(dynamic=False)
    started, running_loss = time.time(), math.nan
    for step, batch in enumerate(batches):
        for optimiser, base_rate in zip(optimisers, base_rates, strict=True):
            optimiser.param_groups[0]["lr"] = base_rate * rate_schedule(step)
        loss = compute_loss(torch.from_numpy(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimiser in optimisers:
            optimiser.step()
        model.zero_grad(set_to_none=True)
        running_loss = loss.item() if step == 0 else 0.95 * running_loss + 0.05 * loss.item()
        if step % 10 == 0:
            print(f"step {step} loss {running_loss:.4f} seconds {time.time() - started:.0f}", flush=True)


def first_batches(documents: list[numpy.ndarray]) -> Iterator[numpy.ndarray]:
    stream = demo_data.PackedStream(documents, SEED)
    for phase in PHASES:
        for _ in range(phase.num_steps):
            yield stream.next_batch(phase.num_rows, phase.num_tokens)


def second_batches(tokenizer: Tokenizer, files: list[demo_data.SourceFile]) -> Iterator[numpy.ndarray]:
    texts = [file.content.decode("utf-8") for file in files]
    sources = (
        (SNIPPET_ROWS, demo_snippets.WholeTexts(tokenizer, demo_snippets.snippets(files), SEED + 1)),
        (CHAT_ROWS, demo_snippets.WholeTexts(tokenizer, demo_snippets.short_chats(files), SEED + 2)),
        (FILE_ROWS, demo_data.PackedStream(demo_data.encode_documents(tokenizer, texts), SEED + 3)),
    )
    for _ in range(SECOND_STEPS):
        yield numpy.concatenate([source.next_batch(num_rows, SECOND_TOKENS) for num_rows, source in sources])


def replace_file(path: Path, text: str) -> None:
    """Replace the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Save bf16 weights and config.json, each replaced atomically. The model keeps its dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        copy.to(torch.bfloat16).save_pretrained(temporary)
        for name in ("config.json", "model.safetensors"):
            (Path(temporary) / name).chmod(0o644)
            os.replace(Path(temporary) / name, folder / name)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    replace_file(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    roles = [f"<|{role}|>" for role in demo_data.ROLES]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": demo_data.END_OF_TEXT,
        "eos_token": demo_data.END_OF_TURN,
        "pad_token": demo_data.PADDING,
        "additional_special_tokens": roles,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAXIMUM_CONTEXT,
        "chat_template": demo_data.CHAT_TEMPLATE,
    }
    replace_file(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    generation = {
        "bos_token_id": tokenizer.token_to_id(demo_data.END_OF_TEXT),
        "eos_token_id": [tokenizer.token_to_id(token) for token in (demo_data.END_OF_TEXT, demo_data.END_OF_TURN)],
        "pad_token_id": tokenizer.token_to_id(demo_data.PADDING),
    }
    replace_file(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def run_first_stage() -> None:
    """Train the tokenizer and the model on whole files, and save them to INTERIM."""
    started, processor_started = time.time(), time.process_time()
    torch.manual_seed(SEED)
    files, _ = demo_data.read_library()
    texts = [file.content.decode("utf-8") for file in files]
    tokenizer = demo_data.train_tokenizer(texts, VOCABULARY_SIZE)
    save_tokenizer(tokenizer, INTERIM)
    documents = demo_data.encode_documents(tokenizer, texts)
    chats = demo_data.encode_documents(tokenizer, list(demo_data.chat_documents(files, CHAT_STRIDE)))
    model = build_model(tokenizer)
    train(model, first_batches(documents + chats), first_share)
    save_weights(model, INTERIM)
    record = {
        "steps": FIRST_STEPS,
        "tokens_seen": sum(phase.num_steps * phase.num_rows * phase.num_tokens for phase in PHASES),
        "text_tokens_per_pass": sum(map(len, documents)),
        "chat_tokens_per_pass": sum(map(len, chats)),
        "wall_seconds": round(time.time() - started),
        "processor_seconds": round(time.process_time() - processor_started),
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }
    replace_file(INTERIM / RECORD, json.dumps(record, indent=2) + "\n")


def run_second_stage() -> None:
    """Continue from INTERIM on short, complete texts, and save the finished checkpoint to OUTPUT."""
    started, processor_started = time.time(), time.process_time()
    tokenizer = Tokenizer.from_file(str(INTERIM / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(INTERIM, dtype=torch.float32)
    model.train()
    files, _ = demo_data.read_library()
    train(model, second_batches(tokenizer, files), second_share)
    save_tokenizer(tokenizer, OUTPUT)
    save_weights(model, OUTPUT)
    record = json.loads((INTERIM / RECORD).read_text(encoding="utf-8"))
    record["second_steps"] = SECOND_STEPS
    record["tokens_seen"] += SECOND_STEPS * SECOND_TOKENS * (SNIPPET_ROWS + CHAT_ROWS + FILE_ROWS)
    record["wall_seconds"] += round(time.time() - started)
    record["processor_seconds"] += round(time.process_time() - processor_started)
    replace_file(OUTPUT / RECORD, json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--second", action="store_true", help="only the second stage, from an earlier first stage")
    only.add_argument("--evaluate", action="store_true", help="only evaluate and rewrite the model card")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    if not arguments.second and not arguments.evaluate:
        run_first_stage()
    if not arguments.evaluate:
        run_second_stage()
    # Imported late, so that the evaluation can be edited during a training run.
    import demo_eval

    demo_eval.evaluate(OUTPUT)


if __name__ == "__main__":
    main()
