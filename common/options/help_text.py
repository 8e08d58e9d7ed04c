"""What `serve-llm --help` says besides the options."""

from __future__ import annotations

import argparse

COMMANDS = {
    "MODEL": "serve a directory, GGUF file or Hugging Face id",
    "chat [URL|MODEL]": "talk to a model in the terminal",
    "bench NAME [URL|MODEL]": "measure serve, latency, throughput or start",
    "top [URL]": "show what a server is doing",
    "scale [URL]": "add engines to a server or remove some",
    "plan MODEL": "say whether and how a model fits GPUs and machines",
    "check [MODEL]": "check whether this host, or several, can serve",
    "front-end HOST:PORT": "answer clients here for a server on another host",
    "run-batch MODEL -i -o": "answer a file of requests",
    "convert MODEL -o": "write pytorch_model*.bin as safetensors",
    "collect-env": "print what a bug report needs",
    "completion SHELL": "print a script that completes options",
}

EXIT_CODES = {
    0: "stopped by a signal, or the command has finished",
    1: "a bug; for chat, bench and check: a failed request or a problem",
    2: "options: unknown, invalid or conflicting",
    3: "the model: missing or damaged files, an unsupported architecture",
    4: "capacity: too little memory or too few GPUs",
    5: "the engine failed at start, or too often",
}

EXAMPLES = (
    "serve-llm demo",
    "serve-llm Qwen/Qwen3-0.6B --max-model-len 8k --quantization int8",
    "serve-llm org/model -tp 4 --host 0.0.0.0 --api-key KEY",
    "serve-llm --config server.yaml",
    "serve-llm chat http://127.0.0.1:8000",
)

DESCRIPTION = (
    "Serve a language model behind the OpenAI API.\n\ncommands, each with --help:\n"
    + "\n".join(f"  {command:<24}{text}" for command, text in COMMANDS.items())
    + "\n\nOptions of vLLM, SGLang, llama.cpp and Ollama are translated or explained: docs/from-other-engines.md."
)

NOTES = (
    "EXIT STATUS:\n"
    + "\n".join(f"  {code}  {text}" for code, text in EXIT_CODES.items())
    + "\n\nEXAMPLES:\n"
    + "\n".join(f"  {line}" for line in EXAMPLES)
)


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs, but keeps those that contain line breaks as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.split("\n\n")
        return "\n\n".join(part if "\n" in part else fill(part, width, indent) for part in paragraphs)


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows only informative defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)
