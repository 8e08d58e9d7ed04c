"""Checks whether a transformers model can be served, by running it on a few tokens and recording its attention calls.

It accepts only what the KV cache, the kernels and the scheduler support; anything else is an error that names it.

The probe replaces attention by a function that does not mix tokens and records every call. It then runs the same tokens
in another order, each with its original position: the hidden rows must be permuted in the same way. Otherwise something
besides attention carries information between tokens (a convolution, a recurrent state), or the model ignores the given
positions. Without positions, the model must count 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from serve_llm.common.errors import UnsupportedModel
from serve_llm.engine.hf_backend.decoder import AttentionCall, AttentionShape, attend, compute_logits, split_model

NAME = "serve_llm_trial"  # the same attention function, with a mask function that finds the window
LONGEST = 1 << 20  # positions for which masks are evaluated
ORDER = (3, 0, 6, 1, 7, 5, 2, 4)
# Arguments of attention functions that can be ignored; windows come from the mask.
HARMLESS = frozenset(
    "dropout sliding_window position_ids cache_position use_cache output_attentions output_hidden_states "
    "output_router_logits return_dict position_embeddings layer_idx is_causal".split()
)
# (batch, head, query, key) -> whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _ProbeRejection(Exception):
    """Why the model cannot be served; completes the message of UnsupportedModel."""


def note_mask(
    *, mask_function: MaskFunction, q_length: int, kv_length: int, device: torch.device, **_: object
) -> Tensor:
    """The mask function that transformers calls. Returns (1, 1, queries, keys) int32: the window, or 0 for none."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(LONGEST, device=device)[None, :]

    def evaluate_mask(queries: Tensor) -> Tensor:
        """queries: positions (queries, 1). Returns (queries, LONGEST) bool."""
        return mask_function(first, first, queries, keys).expand(len(queries), LONGEST)

    window = int(evaluate_mask(torch.tensor([[LONGEST - 1]], device=device)).sum())
    positions = {0, 1, window - 1, window, window + 1, 2 * window - 1, 3 * window // 2, LONGEST // 2 - 3, LONGEST - 1}
    in_range = sorted(position for position in positions if 0 <= position < LONGEST)
    queries = torch.tensor(in_range, device=device)[:, None]
    if not torch.equal(evaluate_mask(queries), (keys <= queries) & (keys > queries - window)):
        raise _ProbeRejection("its attention mask is neither causal nor a sliding window")
    value = torch.tensor(0 if window == LONGEST else window, dtype=torch.int32, device=device)
    return value.expand(1, 1, q_length, kv_length)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, note_mask)


class _Probe:
    """The step of a probe run. See `decoder.AttentionStep`."""

    def __init__(self, max_model_len: int) -> None:
        self.attention_shapes: dict[nn.Module, AttentionShape] = {}
        self._max_model_len = max_model_len

    def attend(self, call: AttentionCall) -> Tensor:
        heads, _, head_dim = call.query.shape
        kv_heads = call.key.shape[0]
        if call.module in self.attention_shapes:
            raise _ProbeRejection("one of its layers computes attention several times per token")
        if unknown := sorted(name for name, value in call.others.items() if name not in HARMLESS and _is_set(value)):
            raise _ProbeRejection(f"its attention asks for {', '.join(unknown)}, which our kernels do not support")
        if heads % kv_heads or call.value.shape[0] != kv_heads or call.value.shape[-1] > head_dim:
            shapes = ", ".join(str(list(part.shape)) for part in (call.query, call.key, call.value))
            raise _ProbeRejection(f"its queries, keys and values have shapes that our KV cache cannot hold: {shapes}")
        self.attention_shapes[call.module] = AttentionShape(heads, kv_heads, head_dim, self._window(call.mask))
        shared = heads // kv_heads
        key, value = (part.repeat_interleave(shared, 0).float() for part in (call.key, call.value))
        rolled = key.roll(1, -1)  # otherwise the rotations of a token's query and key would cancel out
        scores = (call.query.float() * rolled).sum(-1, keepdim=True) * call.scale
        return (torch.sigmoid(scores) * value).transpose(0, 1).to(call.query.dtype)

    def _window(self, mask: Tensor | None) -> int | None:
        if mask is None or mask.dtype != torch.int32:
            raise _ProbeRejection("its attention mask is not made by transformers' mask functions")
        window = int(mask.flatten()[0])
        return window if 0 < window < self._max_model_len else None


def _is_set(value: object) -> bool:
    return value is not None and value is not False


@dataclass(frozen=True)
class ProbeResult:
    """A model that can be served.

    body, head: see `split_model`. attention_shapes: by module that calls attention, in order of the calls. linears:
    weak references to the linear layers that are called; code may read the weights of others, so they are not packed.
    """

    body: PreTrainedModel
    head: PreTrainedModel
    attention_shapes: Mapping[nn.Module, AttentionShape]
    linears: Set[nn.Module]


@torch.inference_mode()
def probe_model(model: PreTrainedModel, vocab_size: int, max_model_len: int) -> ProbeResult:
    """Check that the model can be served. model: on its device, with the attention NAME; `split_model` is applied to
    it.

    Raises UnsupportedModel if it cannot be served faithfully.
    """
    try:
        return _probe(model, vocab_size, max_model_len)
    except _ProbeRejection as error:
        why = str(error)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code may raise anything
        why = f"its code fails when it is called so: {type(error).__name__}: {' '.join(str(error).split())}"
    raise UnsupportedModel(f"{type(model).__name__} cannot be served by transformers' own code: {why}")


def _probe(model: PreTrainedModel, vocab_size: int, max_model_len: int) -> ProbeResult:
    device = next(model.parameters()).device
    positions = torch.arange(len(ORDER), device=device)
    ids = (positions * 37 + 3) % vocab_size
    order = torch.tensor(ORDER, device=device)
    linears: WeakSet[nn.Module] = WeakSet()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_hook(lambda called, *_: linears.add(called)) for layer in layers]

    def run(
        part: PreTrainedModel, ids: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, dict[nn.Module, AttentionShape]]:
        step = _Probe(max_model_len)
        one_sequence = torch.ones_like(ids).unsqueeze(0)  # all tokens are real, in any order of positions
        position_ids = None if positions is None else positions[None]
        result = part(
            input_ids=ids[None], position_ids=position_ids, attention_mask=one_sequence, use_cache=False, step=step
        )
        rows: Tensor = result[0][0]
        return rows, step.attention_shapes

    logits, _ = run(model, ids, positions)
    body, head = split_model(model)
    if body is head:
        raise _ProbeRejection("its layers are not apart from its head")
    hidden, attention_shapes = run(body, ids, positions)
    permuted, _ = run(body, ids[order], positions[order])
    without_positions, _ = run(body, ids, None)
    if not attention_shapes:
        raise _ProbeRejection("none of its layers calls attention by transformers' interface")
    # The last bits of a product's rows may depend on other rows; the influence of another token is larger than that.
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    if _differ(hidden[order], permuted, tolerance):
        raise _ProbeRejection(
            "something besides attention carries from token to token (a convolution or recurrent state, which our KV "
            "cache does not hold), or it does not use the positions that it is given"
        )
    if _differ(hidden, without_positions, tolerance):
        raise _ProbeRejection("it does not count a sequence's positions as 0, 1, 2, ...")
    if logits.shape[1] != vocab_size or _differ(logits, compute_logits(head, hidden), tolerance):
        raise _ProbeRejection("its logits do not depend on its last hidden states alone, or some id has none")
    for hook in hooks:
        hook.remove()
    return ProbeResult(body, head, attention_shapes, linears)


def _differ(left: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((left.float() - right.float()).norm() > tolerance * left.float().norm())
